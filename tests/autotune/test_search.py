"""Tests the plans that `auto` chooses, its explanations, and the data that it saves."""

import dataclasses
import json
import os
import subprocess
import sys

import keras
import pytest

from tests.launch import ROOT
from tfposeidon import policies, schemes
from tfposeidon.autotune.search import candidates_of, choose_plan, plan_of, predict
from tfposeidon.autotune.simulation import Timeline
from tfposeidon.communication.network_profile import Link, NetworkProfile
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.plan import DEFAULT_BUCKET_BYTES, make_plan
from tfposeidon.factors.pairs import FactorShape
from tfposeidon.gradients import Description

CLUSTER = Topology.regular(0, 32, 8)
LAYERS = [Description(f"layer_{i}/kernel", (1024, 1024), "float32") for i in range(12)]
TIMELINE = Timeline.even(variables=len(LAYERS), first_s=0.02, compute_s=0.05)
SLOW = NetworkProfile.of("5gbit", ranks_per_node=8, device="v100", flow="1gbit")
FAST = dataclasses.replace(
    NetworkProfile.of("400gbit", ranks_per_node=8, device="v100"),
    node=Link(latency_s=1e-5, bytes_per_s=1e9),
)
SMALL = [dataclasses.replace(layer, shape=(32, 32)) for layer in LAYERS]


def choose(policy=None, links=SLOW, layers=LAYERS, topology=CLUSTER, timeline=TIMELINE, **options):
    return choose_plan(
        layers, policy or policies.Auto(), topology, links, timeline=timeline, **options
    )


def _schemes(plan):
    return {str(bucket.scheme) for bucket in plan.buckets}


def test_slow_connections_select_the_torus_and_latency_selects_the_ring():
    assert _schemes(choose()) == {"torus2d"}
    assert _schemes(choose(links=FAST)) == {"alltoall"}
    # Horovod fuses all rings into one, but executes the all-to-alls one after another.
    assert _schemes(choose(links=FAST, layers=SMALL)) == {"allreduce"}


def test_without_a_network_profile_the_plan_is_all_reduce_with_the_reason():
    plan = choose(links=None)
    assert _schemes(plan) == {"allreduce"}
    assert "the network profile is unknown" in str(plan)
    assert not plan.forecasts
    alone = choose(topology=Topology(0, ((0,),)))
    assert "a single rank" in str(alone)
    assert not alone.forecasts


def test_the_plan_is_never_slower_than_uniform_plans():
    for links in (SLOW, FAST):
        for policy in (policies.Auto(margin=0.0), policies.Auto(compression=("fp16",), margin=0.0)):
            chosen = choose(policy, links).forecasts[0].chosen
            for candidate in policy.candidates(CLUSTER).values():
                plan = make_plan(LAYERS, candidate, CLUSTER, DEFAULT_BUCKET_BYTES)
                assert chosen.step_s <= predict(plan, links, TIMELINE)


@pytest.mark.parametrize("rate", ["100mbit", "1gbit", "25gbit", "400gbit"])
@pytest.mark.parametrize("factors", [None, FactorShape(8, 1024, 1024, "float32")])
def test_the_default_plan_is_exact(rate, factors):
    layers = [dataclasses.replace(layer, structure=factors) for layer in LAYERS]
    links = NetworkProfile.of(rate, ranks_per_node=8)
    plan = choose(links=links, layers=layers)
    assert all(bucket.scheme.exact for bucket in plan.buckets)
    halves = choose(policies.Auto(compression=("fp16",)), links, layers)
    assert not any(bucket.slots(CLUSTER) for bucket in halves.buckets)


def test_allowed_compression_is_used_if_faster():
    slow = NetworkProfile.of("200mbit", ranks_per_node=8)
    assert "wire_dtype=float16" in str(_schemes(choose(policies.Auto(compression=("fp16",)), slow)))
    sparse = choose(policies.Auto(compression=("topk",), density=0.05), slow)
    assert {type(bucket.scheme) for bucket in sparse.buckets} == {schemes.HiTopK}
    assert {bucket.scheme.density for bucket in sparse.buckets} == {0.05}
    assert {bucket.scheme.wire_dtype for bucket in sparse.buckets} == {None}
    both = choose(policies.Auto(compression=("fp16", "topk"), density=0.05), slow)
    assert {bucket.scheme.wire_dtype for bucket in both.buckets} == {"float16"}


def test_few_rows_are_sent_as_factors_and_many_are_not():
    def chosen(rows):
        factors = FactorShape(rows, 1024, 1024, "float32")
        layers = [dataclasses.replace(layer, structure=factors) for layer in LAYERS]
        return str(
            _schemes(choose(links=NetworkProfile.of("1gbit", ranks_per_node=8), layers=layers))
        )

    assert "factors" in chosen(1)
    assert "factors" not in chosen(4096)
    # The number of rows is unknown before the first step.
    assert "factors" not in chosen(None)


def test_a_gain_below_the_margin_selects_all_reduce():
    gain = 1 - choose().forecasts[0].chosen.step_s / _first(SLOW)
    assert 0 < gain < 1
    above = choose(policies.Auto(margin=gain + 0.001))
    assert _schemes(above) == {"allreduce"}
    assert above.forecasts[0].others[0].step_s < above.forecasts[0].chosen.step_s
    assert _schemes(choose(policies.Auto(margin=gain - 0.001))) == {"torus2d"}


def _first(links):
    return predict(
        make_plan(LAYERS, policies.parse("allreduce"), CLUSTER, DEFAULT_BUCKET_BYTES),
        links,
        TIMELINE,
    )


def test_large_variables_may_have_another_scheme():
    """One large kernel has factors of one row, and the other has factors of 40,000 rows."""
    factors = FactorShape(1, 4096, 4096, "float32")
    layers = [
        *LAYERS,
        Description("large/kernel", (4096, 4096), "float32", factors),
        Description(
            "second/kernel", (4096, 4096), "float32", dataclasses.replace(factors, rows=4e4)
        ),
    ]
    timeline = Timeline.even(variables=len(layers), first_s=0.02, compute_s=0.05)
    plan = choose(
        links=NetworkProfile.of("1gbit", ranks_per_node=8), layers=layers, timeline=timeline
    )
    buckets = {d.path: bucket for bucket in plan.buckets for d in bucket.descriptions}
    # The bucket chooses its scheme in each step, from the number of rows.
    large, second = (
        buckets[layer.path].sized(8.0, policies.Auto(), CLUSTER) for layer in layers[-2:]
    )
    assert "factors" in str(large.scheme)
    many = buckets["second/kernel"].sized(32 * 4e4, policies.Auto(), CLUSTER)
    assert (str(second.scheme), str(many.scheme)) == ("factors", "torus2d")


def test_a_given_bucket_size_is_used():
    for size in (2**20, DEFAULT_BUCKET_BYTES):
        forecast = choose(bucket_bytes=size).forecasts[0]
        assert {one.bucket_bytes for one in (forecast.chosen, *forecast.others)} == {size}
    # Without computation times, large buckets would always be predicted to be best.
    assert choose(timeline=None).forecasts[0].chosen.bucket_bytes == DEFAULT_BUCKET_BYTES


def test_rules_leave_other_variables_to_auto():
    policy = policies.Rules([("layer_3", schemes.AllToAll(wire_dtype="float16")), (".", "auto")])
    plan = choose(policy)
    by_path = {d.path: str(b.scheme) for b in plan.buckets for d in b.descriptions}
    assert by_path.pop("layer_3/kernel") == "alltoall(wire_dtype=float16)"
    assert set(by_path.values()) == {"torus2d"}
    closed = choose(policies.Rules([("layer_3", schemes.AllToAll(wire_dtype="float16"))]))
    assert _schemes(closed) == {"alltoall(wire_dtype=float16)", "allreduce"}
    assert "no rule matches" in str(closed)
    assert not closed.forecasts[0].others
    halves = policies.Rules([("layer_3", "allreduce"), (".", policies.Auto(compression=("fp16",)))])
    assert "torus2d(wire_dtype=float16)" in _schemes(choose(halves))


def test_a_policy_may_combine_auto_with_rules_that_depend_on_rows():
    """Variables whose rule depends on rows share a bucket until a step provides their rows."""
    factors = FactorShape(1, 32, 32, "float32")
    layers = [dataclasses.replace(layer, structure=factors) for layer in SMALL]
    plan = choose(policies.parse([("layer_[0-5]/", "hybcomm"), (".", "auto")]), layers=layers)
    assert plan.forecasts
    assert sorted(member for bucket in plan.buckets for member in bucket.members) == [*range(12)]
    by_rows = [bucket for bucket in plan.buckets if "rule 'layer_[0-5]/'" in str(bucket.choices)]
    assert [bucket.members for bucket in by_rows] == [tuple(reversed(range(6)))]


def test_every_plan_has_a_prediction_with_a_network_profile():
    plan = choose(policies.parse("torus2d"))
    assert plan.forecasts[0].others == ()
    assert plan.forecasts[0].chosen.step_s == predict(plan, SLOW, TIMELINE)


def test_factors_have_no_cost_before_rows_are_known():
    factors = FactorShape(None, 1024, 1024, "float32")
    layers = [dataclasses.replace(layer, structure=factors) for layer in LAYERS]
    assert not choose(policies.parse("factors"), layers=layers).forecasts
    rules = policies.Rules([("layer_3", "factors"), (".", "auto")])
    names = str(_schemes(choose(rules, layers=layers)))
    assert "factors" in names
    assert "torus2d" in names


def test_the_margin_applies_to_the_best_bucket_size_of_all_reduce():
    plan = choose(links=FAST, layers=SMALL)
    steps = {
        size: predict(make_plan(SMALL, policies.parse("allreduce"), CLUSTER, size), FAST, TIMELINE)
        for size in (DEFAULT_BUCKET_BYTES // 4, DEFAULT_BUCKET_BYTES, 4 * DEFAULT_BUCKET_BYTES)
    }
    assert plan.forecasts[0].chosen.step_s <= min(steps.values())


def test_plans_explain_the_choice():
    text = str(choose())
    step = choose().forecasts[0].chosen.step_s
    assert f"predicted step: {1e3 * step:.4g} ms, of which" in text
    assert "network: 5 Gb/s across nodes (1 Gb/s per connection), v100, specified" in text
    assert "next best: " in text
    assert "not validated: predictions were tested with up to 16 ranks on CPUs" in text
    exchange = str(choose(timeline=None))
    assert "predicted exchange: " in exchange
    many = choose(
        links=NetworkProfile.of("5gbit", ranks_per_node=8), topology=Topology.regular(0, 128, 8)
    )
    assert "not validated: predictions were tested with up to 16 ranks" in str(many)
    content = json.loads(choose().to_json())["forecasts"][0]
    assert content["chosen"]["step_s"] == step
    assert content["links"]["across"]["bytes_per_s"] == SLOW.across.bytes_per_s


def _trial(*slowdowns, links=SLOW):
    """Returns a trial in which schemes have these slowdowns, and the list of its calls."""
    known, calls = dict(slowdowns), []

    def trial(plans):
        names = [next(iter({str(bucket.scheme) for bucket in plan.buckets})) for plan in plans]
        calls.append(names)
        pairs = zip(plans, names, strict=True)
        return [known.get(name, 1.0) * predict(plan, links) for plan, name in pairs]

    return trial, calls


NEAR = NetworkProfile.of("15gbit", ranks_per_node=8, device="v100")
"""Network profile with which the two best schemes have similar predictions."""


def test_close_plans_are_timed():
    without = choose(links=NEAR).forecasts[0]
    names = list(dict.fromkeys(one.name for one in (without.chosen, *without.others)))
    first, second = names[:2]
    trial, calls = _trial(links=NEAR)
    agreeing = choose(links=NEAR, trial=trial).forecasts[0]
    assert calls == [[first, second]]
    assert agreeing.chosen.name == first
    assert agreeing.chosen.step_s == pytest.approx(without.chosen.step_s)
    trial, calls = _trial((first, 1.5), links=NEAR)
    plan = choose(links=NEAR, trial=trial)
    other = plan.forecasts[0]
    assert other.chosen.name == second
    # The slowdown applies to all bucket sizes of the slower scheme.
    slower = [one for one in other.others if one.name == first]
    assert {round(one.slowdown, 6) for one in slower} == {1.5}
    assert f"1.50 ({first})" in str(plan)


def test_candidates_without_a_trial_gain_no_advantage():
    """If all timed candidates have the same slowdown, one of them is still chosen."""
    trial, calls = _trial(("allreduce", 5.0), ("torus2d", 5.0), links=NEAR)
    forecast = choose(links=NEAR, trial=trial).forecasts[0]
    chosen = forecast.chosen
    assert calls == [["torus2d", "allreduce"]]
    assert chosen.name in ("allreduce", "torus2d")
    (shown,) = [line for line in forecast.lines() if line.startswith("timed exchanges")]
    assert "alltoall" not in shown


def test_a_plan_in_use_that_is_faster_than_the_default_is_not_called_slower():
    forecast = choose(policies.Auto(margin=0.9), NEAR).forecasts[0]
    ordered = sorted((forecast.chosen, *forecast.others), key=lambda one: one.step_s)
    assert ordered[0].step_s < forecast.chosen.step_s
    for in_use, is_fastest in ((ordered[0], True), (ordered[-1], False)):
        text = "\n".join(dataclasses.replace(forecast, chosen=in_use).lines())
        assert ("plan retained" in text) != is_fastest
        assert ("% slower" in text) == is_fastest


def test_an_uncertain_network_widens_the_trial():
    """All predictions are close, so the best candidates are timed together with all-reduce."""
    wide = dataclasses.replace(SLOW, uncertainty=2.0, measured_at="2026-11-23T22:00:00+00:00")
    trial, calls = _trial(("hitopk", 99.0), ("topk", 99.0))
    plan = choose(policies.Auto(compression=("topk",), density=0.01), wide, trial=trial)
    (names,) = calls
    assert "allreduce" in names
    assert {"hitopk", "torus2d"} <= set(names)
    assert _schemes(plan) == {"torus2d"}
    trial, calls = _trial()
    assert "hitopk" in str(
        _schemes(choose(policies.Auto(compression=("topk",), density=0.01), trial=trial))
    )


def test_no_trial_if_predictions_differ_or_nothing_is_tunable():
    trial, calls = _trial()
    assert choose(trial=trial).forecasts[0].chosen == choose().forecasts[0].chosen
    assert not calls, "the torus is so much faster that no trial is needed"
    trial, calls = _trial(links=NEAR)
    choose(policies.parse("torus2d"), NEAR, trial=trial)
    assert not calls
    # Each of these exchanges takes about a second, which is too long for a trial.
    trial, calls = _trial(links=NEAR)
    many = [dataclasses.replace(d, shape=(10240, 1024)) for d in LAYERS]
    choose(links=NEAR, layers=many, trial=trial)
    assert not calls


def test_policies_are_saved_without_the_network_profile():
    policy = policies.Auto(compression=("fp16", "topk"), density=0.01, margin=0.1)
    assert policies.Auto.from_config(policy.get_config()) == policy
    for kinds in (["topk", "fp16"], {"fp16", "topk"}):
        assert policies.Auto(compression=kinds, density=0.01, margin=0.1) == policy
    assert set(policy.get_config()) == {"compression", "density", "margin"}
    # Another release saved policies when the class was in another module.
    saved = keras.saving.serialize_keras_object(policy) | {"module": "tfposeidon.policies.auto"}
    assert keras.saving.deserialize_keras_object(saved) == policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0.1}, 'applies only to sparse schemes. Received: density=0.1.*Add "topk"'),
        ({"compression": None}, "must be one or more of fp16, topk. Received: compression=None"),
        ({"density": 0.0}, r"`density` must be a number in \(0, 1\]. Received: density=0.0"),
        ({"density": 1.5}, r"`density` must be a number in \(0, 1\]"),
        ({"compression": ("fp8",)}, "must be one or more of fp16, topk. Received: .*'fp8'"),
        ({"margin": 1.0}, r"`margin` must be a number in \[0, 1\)"),
    ],
)
def test_invalid_arguments_of_auto_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        policies.Auto(**arguments)


def test_a_plan_is_restored_from_its_forecast():
    """A snapshot contains the forecast, from which a run makes the same plan."""
    plan = choose()
    saved = json.dumps(keras.saving.serialize_keras_object(plan.forecasts[0]))
    restored = keras.saving.deserialize_keras_object(json.loads(saved))
    candidate = candidates_of(policies.Auto(), CLUSTER)[restored.chosen.name]
    assert plan_of(restored, LAYERS, candidate, CLUSTER, []) == plan


PLAN_OF_A_RANK = """
import sys
from tests.autotune import test_search as t
print(t.described(t.choose(topology=t.CLUSTER.seen_from(int(sys.argv[1])))))
"""


def described(plan):
    return f"{[(str(b.scheme), b.members) for b in plan.buckets]} {plan.forecasts[0].chosen}"


@pytest.mark.slow
def test_a_plan_is_a_pure_function():
    """The plan is the same on all ranks, in other processes and with another hash seed."""
    variables = {"PYTHONHASHSEED": "2", "PYTHONPATH": f"{ROOT}/tests/without:{ROOT}"}
    command = [sys.executable, "-c", PLAN_OF_A_RANK, "31"]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == described(choose(topology=CLUSTER.seen_from(0)))
