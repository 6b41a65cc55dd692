"""Which runs the figures ask for."""

from __future__ import annotations

from psgd.experiments.figures import fig3, fig5, fig6, fig7, fig8, fig9, rnn2d, rnn_long, rnn_suite


def labels(module, seed: int, size: str = "full") -> set[str]:
    return {run.label for run in module.FIGURE.runs(getattr(module.FIGURE, size), seed)}


def test_the_first_seed_has_everything_and_later_ones_what_claims_need():
    assert labels(fig5, 0) > labels(fig5, 1) == set(fig5.COMPARED)
    assert labels(fig6, 0) == {fig6.SGD, fig6.C1, fig6.C2, fig6.C3, fig6.OURS}
    assert labels(fig6, 9) == {fig6.C3, fig6.OURS}
    assert len(labels(fig7, 0)) == 8
    assert len(labels(rnn_suite, 0)) == 8 * (3 * 2 + 2)
    assert labels(rnn_suite, 4) == set(rnn_suite.OURS)
    assert labels(rnn2d, 0) == labels(rnn2d, 4) == {rnn2d.OURS}
    assert len(labels(fig8, 0)) == 9
    assert labels(fig8, 4) == {fig8.SMALL_SGD, fig8.SGD, fig8.C3, fig8.REGULARIZED}


def test_limits_are_set_where_they_are_needed_and_nowhere_else():
    for module, limited in ((fig3, {"c1", "Newton"}), (fig7, set()), (fig8, set()), (fig9, {"c1", "c2", "c3"})):
        runs = module.FIGURE.runs(module.FIGURE.full, 0)
        assert {run.settings["method"] for run in runs if "max_norm" in run.settings} == limited


def test_what_is_not_followed_is_trained_for_less_in_the_quick_size():
    epochs = {run.label: run.settings["epochs"] for run in fig8.FIGURE.runs(fig8.FIGURE.quick, 0)}
    assert epochs[fig8.C3] == fig8.FIGURE.quick["epochs"] > epochs[fig8.C1] == fig8.FIGURE.quick["short_epochs"]


def test_both_kinds_of_settings_of_the_recurrent_network_differ():
    ours, papers = (
        next(run.settings for run in fig6.FIGURE.runs(fig6.FIGURE.full, 0) if run.label == name)
        for name in (fig6.OURS, fig6.C3)
    )
    assert papers["precond_lr"] == 0.01
    assert papers["max_norm"] == 1
    assert ours["warmup"] > 0
    assert ours["momentum"] > 0


def test_the_digit_reader_has_distortions_at_full_size_alone():
    limits = ("shift", "degrees", "scale", "bend")
    (full,), (quick,) = (rnn2d.FIGURE.runs(size, 0) for size in (rnn2d.FIGURE.full, rnn2d.FIGURE.quick))
    assert all(full.settings[name] > 0 for name in limits)
    assert not any(quick.settings[name] for name in limits)


def test_twice_as_long_sequences_have_the_recipe_of_the_others():
    suite, long = (module.FIGURE.runs(module.FIGURE.full, 0) for module in (rnn_suite, rnn_long))
    ours = [dict(run.settings) for run in suite if run.label in rnn_suite.OURS]
    assert [dict(run.settings) for run in long] == [settings | {"length": 200} for settings in ours]
    assert [run.label for run in long] == rnn_suite.OURS
    for size in ("quick", "full"):
        assert getattr(rnn_long.FIGURE, size)["length"] == 2 * getattr(rnn_suite.FIGURE, size)["length"]
