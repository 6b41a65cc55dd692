"""The files around the package agree with it and with each other."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import psgd

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in GITHUB.glob("workflows/*.yml")}

#: variables of the Makefile with the versions of torch at the ends of what is supported
ENDS = ("OLDEST", "NEWEST")

in_repository = pytest.mark.skipif(not GITHUB.exists(), reason="an sdist has no workflows")


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pythons() -> list[str]:
    versions = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text) for text in PROJECT["classifiers"]]
    return [found[1] for found in versions if found]


@in_repository
class TestWorkflows:
    def test_tests_run_on_every_python_that_is_promised(self):
        matrix = WORKFLOWS["tests.yml"]["jobs"]["test"]["strategy"]["matrix"]
        assert matrix["python"] == pythons()
        assert PROJECT["requires-python"] == f">={pythons()[0]}"
        minor = [int(version.partition(".")[2]) for version in pythons()]
        assert minor == list(range(minor[0], minor[-1] + 1))

    def test_the_oldest_and_the_newest_torch_are_tested_too(self):
        job = WORKFLOWS["tests.yml"]["jobs"]["versions"]
        found = {entry["version"]: entry["python"] for entry in job["strategy"]["matrix"]["include"]}
        assert found == {"oldest": pythons()[0], "newest": pythons()[-1]}
        assert job["steps"][-1]["run"] == "make test-versions VERSIONS=${{ matrix.version }}"

    def test_only_platforms_that_are_not_promised_may_fail(self):
        jobs = WORKFLOWS["tests.yml"]["jobs"]
        assert [name for name, job in jobs.items() if job.get("continue-on-error")] == ["platforms", "mps"]
        assert jobs["platforms"]["strategy"]["matrix"]["os"] == ["macos-latest", "windows-latest"]
        assert jobs["mps"]["env"]["PSGD_MPS"] == "1"
        assert (ROOT / jobs["mps"]["steps"][-1]["run"].split()[-1]).exists()

    def test_the_page_on_platforms_names_jobs_that_are_there(self):
        page = (ROOT / "docs" / "everyday.md").read_text("utf-8")
        table = page.partition("| platform | what was run |")[2].partition("\n\n")[0]
        named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[3])}
        assert named == set(WORKFLOWS["tests.yml"]["jobs"])

    @pytest.mark.parametrize(
        ("linter", "file", "right", "wrong", "said"),
        [
            ("check-jsonschema", "docs.yml", "runs-on:", "runs-in:", "'runs-on' is a required property"),
            ("zizmor", "release.yml", '"$GITHUB_REF_NAME" >', '"${{ github.ref_name }}" >', "template-injection"),
        ],
    )
    def test_faults_are_found_by_the_linters_of_make_lint(self, linter, file, right, wrong, said, tmp_path):
        """The command is that of pre-commit; the workflows themselves pass, and one with a fault does not."""
        program = Path(sys.executable).parent / linter
        if not program.exists():
            pytest.skip(f"no {linter} in this environment")
        hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
        entry = next(hook["entry"] for hook in hooks if hook["entry"].startswith(linter)).split()[1:]
        names = [] if ".github" in entry else [f".github/workflows/{name}" for name in WORKFLOWS]
        command = [str(program), *entry, *names]
        shutil.copytree(GITHUB, tmp_path / ".github")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        path = tmp_path / ".github" / "workflows" / file
        text = path.read_text("utf-8")
        assert right in text
        path.write_text(text.replace(right, wrong), "utf-8")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode != 0
        assert said in done.stdout

    @pytest.mark.parametrize("name", ["tests.yml", "docs.yml", "dist.yml", "release.yml"])
    def test_they_do_what_make_does_and_may_do_no_more_than_they_need(self, name):
        workflow = WORKFLOWS[name]
        assert workflow["permissions"] == {"contents": "read"}
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        if not (ROOT / "mkdocs.yml").exists():
            targets.add("docs")
        for job in workflow["jobs"].values():
            assert "uses" in job or job["timeout-minutes"] <= 60
            for step in job.get("steps", []):
                if "uses" in step:
                    assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
                for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
                    assert target in targets
            if "uses" in job:
                called = WORKFLOWS[Path(job["uses"]).name]
                assert "workflow_call" in called[True]  # what YAML makes of the word "on"

    def test_only_what_was_tried_is_published_and_without_a_password(self):
        jobs = WORKFLOWS["release.yml"]["jobs"]
        assert WORKFLOWS["release.yml"][True] == {"push": {"tags": ["v*"]}}
        assert set(jobs["publish"]["needs"]) == {"tests", "dist"}
        assert {jobs[name]["needs"] for name in ("tests", "dist")} == {"notes"}
        assert jobs["publish"]["permissions"] == {"id-token": "write"}
        assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()

    def test_all_that_is_installed_is_kept_up_to_date(self):
        updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
        assert {entry["package-ecosystem"] for entry in updates} == {"pip", "github-actions"}

    @pytest.mark.parametrize("name", ["bug", "feature", "question"])
    def test_forms_can_be_shown(self, name):
        form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= set(form)
        ids = [entry["id"] for entry in form["body"]]
        assert len(ids) == len(set(ids))
        for entry in form["body"]:
            assert entry["type"] in {"textarea", "dropdown", "checkboxes"}
            assert entry["attributes"]["label"]
            assert entry["type"] == "textarea" or entry["attributes"]["options"]
        assert any(entry.get("validations", {}).get("required") for entry in form["body"])


class TestCitation:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))

    def test_it_has_all_that_the_format_wants(self):
        assert {"cff-version", "message", "title", "authors"} <= set(self.citation)
        assert self.citation["cff-version"] == "1.2.0"
        assert self.citation["license"] == PROJECT["license"]
        assert self.citation["authors"] == PROJECT["authors"]

    def test_it_is_of_this_version(self):
        assert str(self.citation["version"]) == psgd.__version__

    def test_the_paper(self):
        paper = self.citation["preferred-citation"]
        assert {"type", "title", "authors"} <= set(paper)
        assert paper["doi"] == "10.1109/TNNLS.2017.2672978"
        assert paper["authors"] == [{"family-names": "Li", "given-names": "Xi-Lin"}]
        assert all(isinstance(paper[key], int) for key in ("year", "month", "volume", "issue", "start", "end"))


class TestRelease:
    release = tool("release_notes")
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")

    def test_the_changelog_begins_with_this_version(self):
        assert self.release.version() == psgd.__version__
        first = re.search(r"^## (.+)$", self.changelog, flags=re.MULTILINE)
        assert re.fullmatch(rf"{re.escape(psgd.__version__)}, (unreleased|\d{{4}}-\d{{2}}-\d{{2}})", first[1])
        assert "`PSGD`" in self.changelog

    def test_notes_are_the_part_of_the_version(self):
        version = psgd.__version__
        headings = ("99.0, unreleased", f"{version}, 2030-01-02", "0.0.1, 2000-01-01")
        changelog = "# Changelog\n\n" + "\n".join(f"## {text}\n\n* {k}\n" for k, text in enumerate(headings))
        citation = f"version: {version}\ndate-released: 2030-01-02\n"
        assert self.release.notes(f"v{version}", changelog, citation) == "* 1"

    @pytest.mark.parametrize(
        ("tag", "changelog", "citation", "said"),
        [
            ("v99.0", "## {}, 2030-01-02\n", "version: {}\ndate-released: 2030-01-02\n", "the tag is v99.0"),
            ("v{}", "## 99.0, 2030-01-02\n", "version: {}\ndate-released: 2030-01-02\n", "has no heading"),
            ("v{}", "## {}, unreleased\n", "version: {}\ndate-released: 2030-01-02\n", "'unreleased' where the date"),
            ("v{}", "## {}, 2030-01-02\n", "version: 99.0\ndate-released: 2030-01-02\n", "no line 'version: "),
            ("v{}", "## {}, 2030-01-02\n", "version: {}\n", "no line 'date-released: 2030-01-02'"),
        ],
    )
    def test_what_does_not_agree_is_no_release(self, tag, changelog, citation, said):
        texts = [text.replace("{}", psgd.__version__) for text in (tag, changelog, citation)]
        with pytest.raises(SystemExit, match=said):
            self.release.notes(*texts)


def build_wheel(folder, **environment):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    inherited = {name: value for name, value in os.environ.items() if name != "PSGD_REPOSITORY"}
    subprocess.run(command, cwd=ROOT, env={**inherited, **environment}, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("dist"))


class TestWheel:
    check = tool("check_dist")

    def test_it_has_the_package_and_nothing_else(self, wheel):
        assert self.check.check_wheel(wheel) == psgd.__version__
        with zipfile.ZipFile(wheel) as archive:
            assert "psgd/py.typed" in archive.namelist()
            assert "psgd/experiments/report.css" in archive.namelist()

    def test_it_names_an_address_only_if_there_is_one(self, wheel, tmp_path):
        assert self.check.metadata_of(wheel).get_all("Project-URL") is None
        other = build_wheel(tmp_path, PSGD_REPOSITORY="https://example.org/psgd/")
        found = self.check.metadata_of(other).get_all("Project-URL")
        assert "Repository, https://example.org/psgd" in found
        assert "Changelog, https://example.org/psgd/blob/main/CHANGELOG.md" in found

    def test_a_superfluous_file_is_found(self, wheel, tmp_path):
        path = tmp_path / wheel.name
        path.write_bytes(wheel.read_bytes())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("tests/__init__.py", "")
        with pytest.raises(self.check.WrongError, match=r"superfluous \['tests/__init__.py'\]"):
            self.check.check_wheel(path)

    def test_a_missing_file_is_found(self, wheel, tmp_path):
        path = tmp_path / wheel.name
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                if name != "psgd/py.typed":
                    new.writestr(name, old.read(name))
        with pytest.raises(self.check.WrongError, match=r"missing \['psgd/py.typed'\]"):
            self.check.check_wheel(path)


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_allowed():
    """The newest is one that the constraint of ``make test`` does not exceed."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    oldest, newest = (re.search(rf"^{name} := ([\d.]+)$", makefile, flags=re.MULTILINE)[1] for name in ENDS)
    assert PROJECT["dependencies"] == [f"torch>={oldest.removesuffix('.0')}"]
    (pinned,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text("utf-8"), flags=re.MULTILINE)
    assert [oldest, pinned, newest] == sorted([newest, pinned, oldest], key=lambda text: [*map(int, text.split("."))])
    page = (ROOT / "docs" / "everyday.md").read_text("utf-8")
    assert f"torch {oldest} and {newest}" in page
    assert f"torch {pinned}" in page


def test_make_names_all_its_targets():
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, flags=re.MULTILINE)
    for target in phony.split():
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
        assert target == "help" or f'"make {target} ' in makefile
