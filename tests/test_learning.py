"""benchmarks/learning: which runs are made, what is said of them, and that a run repeats bit for bit."""

from __future__ import annotations

import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import readme
from benchmarks.learning import analysis, arms, plan, products, report, texts, trial

SETTING = plan.Setting(model="smollm2", text="pydoc", steps=8)
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
TINY_SETTING = plan.Setting(
    model=TINY,
    text="pydoc",
    steps=4,
    sequences=2,
    length=32,
    eval_every=2,
    eval_blocks=2,
    validation_blocks=3,
    test_blocks=5,
)


def make_plan(**chosen: plan.Arm) -> plan.Plan:
    return plan.Plan("p", SETTING, next(iter(chosen)), chosen, tuple(chosen), (0, 1, 2))


def make_result(arm: str, rate: float, loss: float, seed: int = 0, steps: int = 8) -> dict[str, Any]:
    curve = [{"step": 0, "loss": 4.0}, {"step": 4, "loss": loss + 0.5}, {"step": steps, "loss": loss}]
    return {
        "plan": "p",
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        "final": {"validation": loss, "text": loss + 0.1},
        "curve": curve,
        "trained_parameters": 10,
    }


def as_results(*results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {plan.Run(r["plan"], r["arm"], r["rate"], r["seed"]).file: r for r in results}


def list_rates(plans: dict[str, plan.Plan], results: dict[str, dict[str, Any]]) -> list[tuple[str, float, int]]:
    return [(run.arm, run.rate, run.seed) for run in plan.list_missing(plans, results)]


@pytest.mark.parametrize(("minimum", "first_more"), [(0.1, 4e-3), (1e-5, 2.5e-4)])
def test_a_sweep_goes_on_until_the_best_rate_is_inside(minimum: float, first_more: float) -> None:
    plans = {"p": make_plan(a=plan.Arm("full", sweep=1e-3))}
    done, asked = [], []
    while missing := [entry for entry in list_rates(plans, as_results(*done)) if entry[2] == 0]:
        asked.append([rate for _, rate, _ in missing])
        done += [make_result("a", rate, math.log(rate / minimum) ** 2) for _, rate, _ in missing]
    assert asked[:2] == [[5e-4, 1e-3, 2e-3], [first_more]]
    losses = plan.losses_by_rate(as_results(*done), "p", "a", 0)
    best, rates = min(losses, key=losses.get), sorted(losses)
    assert len(rates) <= plan.MAX_SWEEP
    assert rates[0] < best < rates[-1] or len(rates) == plan.MAX_SWEEP


def test_seeds_and_dependent_rates_wait_for_the_best_rate() -> None:
    arm = plan.Arm("sel", rate_of="p/a", times=(0.5, 1.0))
    plans = {"p": replace(make_plan(a=plan.Arm("full", sweep=1e-3), b=arm))}
    two = [make_result("a", 5e-4, 3.0), make_result("a", 1e-3, 2.0)]
    assert list_rates(plans, as_results(*two)) == [("a", 2e-3, 0)]
    three = [*two, make_result("a", 2e-3, 2.5)]
    expected = [("b", 5e-4, 0), ("b", 1e-3, 0), ("a", 1e-3, 1), ("a", 1e-3, 2)]
    assert list_rates(plans, as_results(*three)) == expected
    done = [*three, make_result("b", 5e-4, 1.0), make_result("b", 1e-3, 2.0)]
    assert list_rates(plans, as_results(*done))[-2:] == [("b", 5e-4, 1), ("b", 5e-4, 2)]


def test_finalists_of_all_plans_come_before_other_arms() -> None:
    def make(name: str) -> plan.Plan:
        chosen = {"a": plan.Arm("full", rate=1e-3), "b": plan.Arm("full", rate=1e-3)}
        return plan.Plan(name, SETTING, "b", chosen, ("b",), (0, 1))

    runs = plan.list_missing({"p": make("p"), "q": make("q")}, {})
    expected = [("p", "b", 0), ("p", "b", 1), ("q", "b", 0), ("q", "b", 1), ("p", "a", 0), ("q", "a", 0)]
    assert [(run.plan, run.arm, run.seed) for run in runs] == expected


def test_a_run_that_diverged_is_no_best_rate() -> None:
    results = as_results(make_result("a", 5e-4, 3.0), make_result("a", 1e-3, 2.0), make_result("a", 2e-3, 2.5))
    results["p/a-lr0.001-seed0.json"]["final"] = None
    assert plan.losses_by_rate(results, "p", "a", 0)[1e-3] == math.inf
    assert plan.find_best_rate(plan.losses_by_rate(results, "p", "a", 0)) is None


def test_every_plan_is_valid_and_names_arms_that_exist() -> None:
    plans = plan.load_plans()
    assert sorted(plan.ORDER) == sorted(file.stem for file in plan.PLANS.glob("*.yaml"))
    for number, chosen in enumerate(plans.values()):
        for arm in chosen.arms.values():
            assert arm.method in arms.METHODS
            origin, _, other = (arm.rate_of or f"{chosen.name}/{chosen.baseline}").rpartition("/")
            assert origin in plan.ORDER[: number + 1]
            assert other in plans[origin].arms


def test_an_unknown_key_of_a_plan_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("setting: {model: smollm2, text: pydoc, stepz: 3}\nbaseline: a\narms: {}\n")
    with pytest.raises(SystemExit, match="setting: unknown key stepz; known are"):
        plan.load_plan("p", tmp_path)


def test_paired_intervals_are_those_of_students_t() -> None:
    found = analysis.compare_pairs({0: 1.0, 1: 2.2, 2: 3.1, 7: 9.0}, {0: 1.5, 1: 2.5, 2: 3.5})
    differences = [-0.5, -0.3, -0.4]
    assert found.mean == pytest.approx(statistics.mean(differences))
    assert found.half_width == pytest.approx(4.303 * statistics.stdev(differences) / math.sqrt(3))
    assert (found.pairs, found.verdict) == (3, "better")
    assert analysis.compare_pairs({0: 1.0}, {0: 2.0}).verdict == "one seed"
    assert analysis.compare_pairs({0: 1.0, 1: 2.0}, {0: 2.0, 1: 1.5}).verdict == "no difference shown"
    assert analysis.compare_pairs({0: 2.0, 1: 3.0}, {0: 1.0, 1: 1.99}).verdict == "worse"
    assert analysis.compare_pairs({0: math.inf, 1: 3.0}, {0: 1.0, 1: 2.0}).verdict == "diverged"
    assert analysis.compare_pairs({0: 1.0}, {0: math.inf}) is None


def test_step_ratios_interpolate_the_baseline_in_log_steps() -> None:
    by_steps = {40: 3.0, 80: 2.0, 160: 1.5}
    assert analysis.find_equal_steps(2.0, by_steps) == pytest.approx(80)
    assert analysis.find_equal_steps(1.75, by_steps) == pytest.approx(math.sqrt(80 * 160))
    assert analysis.find_equal_steps(3.0, by_steps) == pytest.approx(40)
    assert analysis.find_equal_steps(1.5, {**by_steps, 320: 1.5}) == pytest.approx(160)
    assert analysis.find_equal_steps(3.5, by_steps) == 0
    assert analysis.find_equal_steps(math.inf, by_steps) == 0
    assert analysis.find_equal_steps(1.0, by_steps) == math.inf


def test_relative_adam_scales_the_step_of_adamw() -> None:
    weight = torch.randn(5, 7) ** 3
    gradients = [torch.randn(5, 7) for _ in range(3)]
    relative, bias = nn.Parameter(weight.clone()), nn.Parameter(torch.ones(3))
    optimizer = arms.RelativeAdam([relative], [bias], slope=0.3, lr=0.01)
    expected, moments, squares = weight.double(), torch.zeros(5, 7).double(), torch.zeros(5, 7).double()
    curvature = 0.3 / weight.double().square().mean().sqrt()
    for step, gradient in enumerate(gradients, 1):
        relative.grad, bias.grad = gradient.clone(), torch.ones(3)
        optimizer.step()
        moments = 0.9 * moments + 0.1 * gradient.double()
        squares = 0.999 * squares + 0.001 * gradient.double() ** 2
        direction = (moments / (1 - 0.9**step)) / ((squares / (1 - 0.999**step)).sqrt() + 1e-8)
        moved = -0.01 * (direction + arms.WEIGHT_DECAY * expected)
        expected = expected + moved * (1 + curvature * expected.abs())
    torch.testing.assert_close(relative.double(), expected, rtol=20 * torch.finfo(torch.float32).eps, atol=1e-7)
    assert (bias < 1 - 0.029).all()


def test_powerpropagation_starts_at_the_weight() -> None:
    weight = torch.randn(64, 64) ** 3
    power = arms.SignedPower(2.0)
    torch.testing.assert_close(power(power.right_inverse(weight)), weight, rtol=4e-7, atol=0)


@pytest.mark.parametrize(
    "arm",
    [
        plan.Arm("full", rate=1e-2),
        plan.Arm("relative", rate=1e-2),
        plan.Arm("power", rate=1e-2),
        plan.Arm("sel", {"init": "congruent"}, rate=1e-2),
    ],
    ids=lambda arm: arm.method,
)
def test_a_run_learns_and_repeats_bit_for_bit(arm: plan.Arm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(texts, "VOCABULARY", 300)
    monkeypatch.setattr(texts, "HELD_OUT_BLOCKS", 8)
    chosen = plan.Plan("p", TINY_SETTING, "a", {"a": arm})
    run = plan.Run("p", "a", 1e-2, 0)
    first, again = trial.train(chosen, run), trial.train(chosen, run)
    assert first["final"] == again["final"]
    assert first["final"]["text"] < first["start"]["text"] - 0.1
    assert [point["step"] for point in first["curve"]] == [0, 2, 4]
    assert first["tokens"] == 4 * 2 * 32
    assert all(change > 0 for changes in first["change"].values() for change in changes[:2])
    trial.write_result(tmp_path / run.file, first)
    assert plan.read_results(tmp_path)[run.file]["final"]["text"] == pytest.approx(first["final"]["text"], rel=1e-5)
    assert list(plan.list_missing({"p": chosen}, plan.read_results(tmp_path))) == []


def test_a_run_that_diverges_is_written_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(texts, "VOCABULARY", 300)
    monkeypatch.setattr(texts, "HELD_OUT_BLOCKS", 8)
    run = plan.Run("p", "a", 1e30, 0)
    result = trial.train(plan.Plan("p", TINY_SETTING, "a", {"a": plan.Arm("full", rate=1e30)}), run)
    trial.write_result(tmp_path / run.file, result)
    read = plan.read_results(tmp_path)
    assert read[run.file]["final"] is None
    assert [point["step"] for point in read[run.file]["curve"]] in ([0], [0, 2])  # norms keep the first losses finite
    assert plan.losses_by_rate(read, "p", "a", 0) == {1e30: math.inf}


def test_seeds_decide_the_order_of_the_text_and_arms_share_it() -> None:
    blocks = torch.arange(20).view(10, 2)
    batches = trial.draw_batches(blocks, 4, 3, seed=1)
    assert batches.shape == (4, 3, 2)
    assert batches.equal(trial.draw_batches(blocks, 4, 3, seed=1))
    assert not batches.equal(trial.draw_batches(blocks, 4, 3, seed=2))
    assert sorted(batches.view(-1, 2)[:10, 0].tolist()) == list(range(0, 20, 2))


def test_changes_are_sorted_by_the_size_of_the_weight() -> None:
    before = {"layers.0.q_proj": torch.tensor([[0.1, 1.0], [-1.5, 3.0]])}
    after = {"layers.0.q_proj": before["layers.0.q_proj"] + torch.tensor([[0.1, 0.2], [0.3, 0.4]])}
    rms = before["layers.0.q_proj"].square().mean().sqrt().item()
    expected = [0.1 / rms, math.hypot(0.2, 0.3) / math.sqrt(2) / rms, 0.4 / rms]
    found = trial.describe_change(before, after)["q_proj"]
    assert found[:3] == pytest.approx(expected, rel=1e-5)
    assert found[3:] == [None, None]


def test_held_out_blocks_are_of_other_documents_and_share_no_wording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "HELD_OUT_BLOCKS", 8)
    documents = torch.arange(40 * 90).view(40, 90).tolist()
    for number in (1, 4, 9):
        documents[number][:85] = documents[30][:85]
    train, held_out = texts.split_documents(documents, 32)
    assert held_out.shape == (8, 32)
    owners = [[n for n, document in enumerate(documents) if set(block) <= set(document)] for block in held_out.tolist()]
    assert len({owner for (owner,) in owners}) == 8
    assert not {1, 4, 9} & {owner for (owner,) in owners}
    assert not set(train.view(-1).tolist()) & set(held_out.view(-1).tolist())


def test_too_little_distinct_text_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "HELD_OUT_BLOCKS", 4)
    with pytest.raises(SystemExit, match="only 0 of 4 held-out blocks differ enough"):
        texts.split_documents([list(range(100))] * 30, 32)


def test_hashes_of_grams_are_equal_where_the_grams_are() -> None:
    tokens = torch.randint(0, 3, (400,), generator=torch.Generator().manual_seed(0))
    hashes = texts.hash_grams(tokens).tolist()
    grams = [tuple(tokens[n : n + texts.GRAM].tolist()) for n in range(len(hashes))]
    assert len(hashes) == 400 - texts.GRAM + 1
    assert len(set(zip(hashes, grams, strict=True))) == len(set(grams)) == len(set(hashes))


def test_roff_becomes_plain_text() -> None:
    page = '.\\" a comment\n.TH LS 1\n.SH NAME\nls \\- \\fBlist\\fP files\n.PP\n\\fI\\,FILE\\/\\fP\\ name\n'
    assert texts.strip_roff(page) == "NAME\nls - list files\nFILE name"


def test_the_report_says_what_the_runs_gave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(texts, "VOCABULARY", 300)
    monkeypatch.setattr(texts, "HELD_OUT_BLOCKS", 8)
    setting = replace(TINY_SETTING, known="pydoc", known_blocks=2)
    chosen = {"base": plan.Arm("full", sweep=2e-3), "other": plan.Arm("sel", {"init": "congruent"}, rate=2e-3)}
    chosen["long"] = plan.Arm("full", rate_of="p/base", steps=6)
    plans = {"p": plan.Plan("p", setting, "base", chosen, ("base", "other"), (0, 1))}
    while missing := list(plan.list_missing(plans, plan.read_results(tmp_path))):
        for run in missing:
            trial.write_result(tmp_path / run.file, trial.train(plans["p"], run))
    results = plan.read_results(tmp_path)
    report.write_report(plans, results, tmp_path)
    page = (tmp_path / "README.md").read_text()
    rate = min((r["final"]["validation"], r["rate"]) for r in results.values() if r["arm"] == "base" and not r["seed"])[
        1
    ]
    mine, base = (
        [r for r in results.values() if (r["arm"], r["rate"]) == key] for key in (("other", 2e-3), ("base", rate))
    )
    differences = [a["final"]["text"] - b["final"]["text"] for a, b in zip(mine, base, strict=True)]
    table = page.split("| arm | trained |")[1].split("\n\n")[0]
    other = next(line for line in table.splitlines() if "`other`" in line).split(" | ")
    assert (
        other[4] == f"{statistics.mean(differences):+.3f} ± {12.706 * statistics.stdev(differences) / math.sqrt(2):.3f}"
    )
    assert "(not swept)" in other[2] and "baseline" in next(line for line in table.splitlines() if "`base`" in line)
    assert (
        "`long`" not in table and f"6 steps {results[f'p/long-lr{rate:.3g}-seed0.json']['final']['text']:.3f}" in page
    )
    assert "nan" not in page and "None" not in page
    for name in re.findall(r"\(figures/(.*?)\)", page):
        ElementTree.parse(tmp_path / "figures" / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", plan.ORDER)
def test_every_arm_of_every_plan_trains_and_merges(name: str) -> None:
    chosen = plan.load_plan(name)
    scratch = chosen.setting.model != trial.SMOLLM2
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    for arm in chosen.arms.values():
        model = trial.make_model(replace(TINY_SETTING), 300, seed=0)
        start = model(tokens).logits.detach()
        torch.manual_seed(0)
        trained = arms.METHODS[arm.method](model, arms.Task(1e-3, 4, 1, scratch), **arm.options)
        if arm.options.get("init") != "congruent":
            torch.testing.assert_close(trained.model.eval()(tokens).logits, start, rtol=1e-4, atol=1e-4)
        assert trial.train_steps(trained, tokens[None].expand(3, -1, -1), trial.Curve(TINY_SETTING, arm, tokens[:1]), 3)
        trained.model.eval()
        adapted = trained.model(tokens).logits.detach()
        assert not torch.equal(adapted, start)
        torch.testing.assert_close(trial.merge(trained.model).eval()(tokens).logits, adapted, rtol=1e-4, atol=1e-4)


def test_committed_results_are_those_of_the_plans() -> None:
    plans = plan.load_plans()
    for name, result in plan.read_results().items():
        arm = plans[result["plan"]].arms[result["arm"]]
        assert name == plan.Run(result["plan"], result["arm"], result["rate"], result["seed"]).file
        assert (result["method"], result["options"]) == (arm.method, json.loads(json.dumps(arm.options)))
        assert result["steps"] == (arm.steps or plans[result["plan"]].setting.steps)
        if arm.sweep is not None:
            exponent = math.log2(result["rate"] / arm.sweep)
            assert exponent == pytest.approx(round(exponent), abs=0.02)


def test_the_results_in_the_readme_are_those_of_the_json_files() -> None:
    page = readme.README.read_text(encoding="utf-8")
    assert readme.fill_in(page, readme.make_tables()) == page, "python -m benchmarks.readme writes them"
    rows = {cells[1]: cells for line in page.splitlines() if len(cells := line.split("|")) > 5}
    for name, arm, words in (("german", "sel", " SEL "), ("scratch256", "adamw", " AdamW on plain weights ")):
        runs = [r for r in plan.read_results().values() if (r["plan"], r["arm"]) == (name, arm)]
        rate = min((r["final"]["validation"], r["rate"]) for r in runs if r["seed"] == 0)[1]
        loss = statistics.mean(r["final"]["text"] for r in runs if r["rate"] == rate)
        assert f" {loss:.3f} " in rows[words]


def test_a_readme_without_the_mark_of_a_table_is_an_error() -> None:
    page = "a\n<!-- results: scratch -->\n\n| old |\n| row |\n\nb | c\n"
    assert readme.fill_in(page, {"scratch": "| new |"}) == "a\n<!-- results: scratch -->\n\n| new |\n\nb | c\n"
    with pytest.raises(ValueError, match="no line <!-- results: pretrained -->"):
        readme.fill_in(page, {"pretrained": "| new |"})


@pytest.mark.parametrize("method", ["full", "relative"])
def test_arms_from_scratch_start_from_the_weights_that_sel_draws(method: str) -> None:
    found = {}
    for name, options in {method: {}, "sel": {"mode": "congruent", "offset": "column"}}.items():
        model = trial.make_model(TINY_SETTING, 300, seed=3)
        torch.manual_seed(3)
        trained = arms.METHODS[name](model, arms.Task(1e-3, 4, 1, True), **options)
        found[name] = trial.read_weights(trained.model, whole=True)
        assert all(parameter.requires_grad for parameter in model.parameters()) or name == "sel"
    for key, weight in found[method].items():
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.9 * bound < weight.abs().max() <= bound
        torch.testing.assert_close(found["sel"][key], weight, rtol=1e-6, atol=0)


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="this torch cannot name an operator's kernel")
def test_products_in_float32_are_those_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, widened = products._Product.__call__, []
    monkeypatch.setattr(
        products._Product, "__call__", lambda self, *a, **o: [widened.append(self.name), plain(self, *a, **o)][1]
    )
    attend, eps = nn.functional.scaled_dot_product_attention, torch.finfo(torch.bfloat16).eps
    a, b, added = torch.randn(7, 300).bfloat16(), torch.randn(300, 5).bfloat16(), torch.randn(7, 5).bfloat16()
    q = torch.randn(1, 2, 9, 8).bfloat16().requires_grad_()
    exact, precise = a.double() @ b.double(), q.detach().double().requires_grad_()
    with products.products_in_float32():
        results = [a @ b, torch.addmm(added, a, b)]
        results += [(a[None] @ b[None])[0], torch.baddbmm(added[None], a[None], b[None])[0]]
        assert (a.float() @ b.float()).dtype is torch.float32
        attended = attend(q, q, q, is_causal=True)
        attended.float().square().sum().backward()
    assert set(widened) == products.OPERATORS.keys()
    for result, expected in zip(results, [exact, exact + added.double()] * 2, strict=True):
        assert result.dtype is torch.bfloat16
        # Half a unit of the result, and 300 sums of at most 3 * 3 in float32.
        bound = expected.abs() * eps / 2 + 300 * 9 * torch.finfo(torch.float32).eps
        assert bool(((result.double() - expected).abs() <= bound).all())
    ideal = attend(precise, precise, precise, is_causal=True)
    ideal.square().sum().backward()
    for result, expected in ((attended, ideal), (q.grad, precise.grad)):
        assert result.dtype is torch.bfloat16
        # Roundings to bf16: of the output, of its gradient, of three gradients and of their two sums.
        assert bool(((result.double() - expected).abs() <= 7 * eps * expected.abs().max()).all())
