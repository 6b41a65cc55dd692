"""The paper's experiments: each problem in a module of its own, apart from what is shown of it."""
