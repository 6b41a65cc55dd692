"""Commands of ``psgd``, each in a module of its own, which is imported when the command is called."""
