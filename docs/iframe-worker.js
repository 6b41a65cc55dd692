/* Search of pages that are opened as files. Browsers refuse to start a worker from a file, and the theme searches in one.
   Here the worker is a hidden frame that runs the same script, and messages are events of its window. */
if (location.protocol === "file:") {
    window.Worker = class extends EventTarget {
        constructor(script) {
            super()
            const frame = document.createElement("iframe")
            frame.hidden = true
            document.documentElement.append(frame)
            const page = frame.contentDocument
            this.inside = frame.contentWindow
            this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
            this.inside.importScripts = (...others) => Promise.all(others.map(other => this.run(page, other)))
            this.ready = this.run(page, script)
        }

        run(page, script) {
            return new Promise((done, failed) => {
                const element = page.createElement("script")
                element.src = String(script)
                element.onload = done
                element.onerror = failed
                page.documentElement.append(element)
            })
        }

        postMessage(data) {
            this.ready = this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
        }

        terminate() {}
    }
}
