"""check_hook passes gradcomp's hooks, and finds the defects of torch's."""

import io
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import gradcomp.ops
from benchmarks.kit_verdicts import OURS, TORCHS, main, table
from gradcomp.hooks import default_hooks
from gradcomp.hooks import powerSGD_hook as powerSGD
from gradcomp.testing import PropertyFailure, Workload, check_hook, claims_of, properties
from tests.depth import everyday
from tests.testing import compressors
from tests.testing.averaging import done, first_element_lost, scaled_mean
from tests.testing.right_hooks import EF21, Keyed

PROPERTIES = set(properties.__all__)


# Every day a part of OURS in plain torch, and others on the kernels, where PowerSGD of rank 1 is wrapped.
IN_PLAIN_TORCH = ("fp16", "batched r=1", "int4")
ON_KERNELS = [name for name in OURS if name not in (*IN_PLAIN_TORCH, "auto", "PowerSGD r=1")]


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("name", everyday(IN_PLAIN_TORCH, OURS))
def test_our_hooks_hold_what_they_claim(name):
    report = check_hook(*OURS[name], max_examples=everyday(2, 6), processes=False)
    report.raise_if_failed()
    assert set(report.verdicts) == PROPERTIES
    held = {name for name, verdict in report.verdicts.items() if verdict.outcome == "holds"}
    always = {"completes", "finite_in_finite_out", "replicas_identical", "deterministic", "averages"}
    assert held >= always | {"nonfinite_seen_by_all", "scale_equivariant"}
    assert ("rank_permutation" in held) == (name not in ("int4", "auto"))  # its own shard isn't rounded
    assert ("zero_stays_zero" in held) == ("batched" not in name)
    if OURS[name][1] is None:
        assert "bucket_insensitive" in held
    else:
        assert "held_back_comes_out" in held
        # What a state of auto_hook keeps depends on the candidate in use, and after a load on the first one.
        kept = {"checkpoint_round_trip", "bounded_memory"}
        assert held & kept == (set() if name == "auto" else kept)
        assert ("contraction" in held) == (name != "int8")  # int8 is near enough to count as averaging
        has_rank = "batched" not in name and not name.startswith(("int", "auto"))
        assert ("exact_up_to_rank" in held) == ("no_error_where_exact" in held) == has_rank
    once = {"stays_in_its_group", "random_state_kept"}
    assert all(report.verdicts[name].num_examples >= 2 for name in held - once)


@pytest.mark.usefixtures("plain_torch")
def test_auto_hook_holds_what_changes_with_its_candidates():
    only = ["completes", "replicas_identical", "averages", "held_back_comes_out", "nonfinite_seen_by_all"]
    check_hook(*OURS["auto"], max_examples=1, only=only).raise_if_failed()


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("name", ["int8", "pertensor", "perchannel"])
def test_zeros_stay_zeros_in_every_kind_of_block(name):
    """Padding rows, unseen rows, pruned or masked elements."""
    report = check_hook(*OURS[name], max_examples=4, only=["zero_stays_zero"])
    report.raise_if_failed()
    assert report.verdicts["zero_stays_zero"].outcome == "holds"


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", everyday(ON_KERNELS, OURS))
def test_our_kernels_too(name, monkeypatch, device):
    """Under the interpreter, or on the GPU, hooks are checked on few and small workloads."""
    only = ["averages", "replicas_identical", "exact_up_to_rank", "nonfinite_seen_by_all"]
    device = device.type
    workload = Workload(((9, 8), (3,)), steps=4, noise=1.0, drift=0.5, device=device)
    hook, make_state = OURS[name]
    with monkeypatch.context() as plain_torch:  # the probe doesn't test kernels
        plain_torch.setattr(gradcomp.ops, "_INTERPRETED", False)
        claims = claims_of(hook, make_state, device)
    for each in only:
        getattr(properties, each)(hook, make_state, workload, claims=claims)
    # Most properties have listed workloads; under the interpreter these take minutes.
    searched = ["averages" if device == "cuda" else "deterministic"]
    options = {"max_examples": 2, "only": searched, "device": device, "claims": claims}
    check_hook(hook, make_state, **options).raise_if_failed()


@pytest.mark.usefixtures("plain_torch")
def test_three_ranks_and_other_dtypes():
    dtypes = (torch.float64, torch.bfloat16, torch.float16)
    only = ["averages", "exact_up_to_rank", "finite_in_finite_out", "rank_permutation"]
    options = {"world_size": 3, "max_examples": everyday(2, 6), "dtypes": dtypes, "only": only}
    for name in ("allreduce", "PowerSGD r=1"):
        check_hook(*OURS[name], **options).raise_if_failed()


def test_torchs_defects_are_found_by_search():
    only = ["completes", "finite_in_finite_out", "averages", "no_error_where_exact", "checkpoint_round_trip"]
    report = check_hook(*TORCHS["PowerSGD r=1"], max_examples=25, only=only)
    found = {failure.property: failure for failure in report.failures}
    assert list(found) == [name for name in only if name != "averages"]
    assert len(found["completes"].counterexample.buckets) == 2
    assert found["finite_in_finite_out"].counterexample.spectra == ("zero",)
    assert found["no_error_where_exact"].counterexample == Workload(((1, 1),), steps=3, noise=0.1)
    # Workloads that raise an exception that has failed an earlier property are passed over.
    assert report.verdicts["averages"].outcome == "holds"
    assert 0 < report.verdicts["averages"].num_examples < 25
    with pytest.raises(
        PropertyFailure, match=r"(?s)completes fails for\n  Workload\(.*dataclasses.replace\(claims_of"
    ):
        report.raise_if_failed()


def test_a_failure_shows_what_the_hook_printed_and_may_end_the_check(capsys):
    def doubled(group, bucket):
        print(f"bucket {bucket.index()}")
        return scaled_mean(2.0)(group, bucket)

    report = check_hook(doubled, max_examples=2, processes=False, fail_fast=True)
    (failure,) = report.failures
    assert re.search(r"The hook printed, at the end:(\nbucket \d){5}$", failure.message)
    assert report.verdicts["scale_equivariant"].note == "a property before it fails"
    assert capsys.readouterr() == ("", "")


def test_checks_in_threads_give_standard_output_back():
    output, only = sys.stdout, ["completes"]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda n: check_hook(first_element_lost, max_examples=n, only=only), (2, 6)))
    assert sys.stdout is output


def test_a_slow_hook_is_not_checked(monkeypatch):
    clock = [0.0]
    time = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("gradcomp.testing.properties.subject.time", time)

    def slow(group, bucket):
        clock[0] += 1.0
        return default_hooks.allreduce_hook(group, bucket)

    report = check_hook(slow, max_examples=9, only=["completes", "averages"], processes=False)
    verdicts = {(each.outcome, each.note) for each in report.verdicts.values()}
    assert verdicts == {("not checked", "too slow: a call of the hook takes 1 s")}
    assert clock[0] <= 200


def test_a_hook_for_cuda_only_is_refused():
    def hook(group, bucket):
        raise RuntimeError(message)

    message = "expected a CUDA tensor"
    with pytest.raises(ValueError, match=r'fails on CPU tensors: .* CUDA tensor.* device="cuda"'):
        check_hook(hook)
    message = "no file cuda.yaml"
    (failure,) = check_hook(hook, max_examples=2).failures
    assert message in failure.message


def test_what_fails_only_once_is_not_checked():
    num_calls = iter(range(10**6))

    def hook(group, bucket):
        if next(num_calls) == 60:
            raise OSError("the disk was full")
        return default_hooks.allreduce_hook(group, bucket)

    report = check_hook(hook, max_examples=9, only=["completes", "averages"], processes=False)
    assert [each.outcome for each in report.verdicts.values()] == ["not checked", "holds"]
    assert report.verdicts["completes"].note.endswith("raised OSError: the disk was full")


def test_a_hook_that_never_runs():
    report = check_hook(*TORCHS["batched r=1"], max_examples=5)
    assert not report.ok
    (failure,) = report.failures
    assert (failure.property, failure.counterexample.steps) == ("completes", 6)
    assert "raised AssertionError" in failure.message
    assert {verdict.outcome for verdict in report.verdicts.values()} == {"fails", "not checked"}
    with pytest.raises(PropertyFailure) as caught:
        report.raise_if_failed()
    assert "claims=" not in str(caught.value)  # no hook may hang or raise, whatever it claims


@pytest.mark.usefixtures("plain_torch")
def test_the_report_and_that_it_repeats():
    reports = [
        check_hook(default_hooks.fp16_compress_hook, max_examples=3, processes=False) for _ in range(2)
    ]
    assert str(reports[0]) == str(reports[1])
    rows = str(reports[0]).splitlines()
    assert rows[0] == "fp16_compress_hook"
    assert re.fullmatch(r"averages +holds +6  error / tolerance ≤ 0\.\d+", rows[9])
    assert re.fullmatch(r"zero_stays_zero +holds +5", rows[10])
    assert re.fullmatch(r"contraction +not claimed +contraction is None", rows[12])
    assert len(rows) == 2 + len(PROPERTIES)
    assert table({"fp16": reports[0]}).count("✓") == 12
    with pytest.raises(ValueError, match=r"unknown properties \['convergence'\]"):
        check_hook(default_hooks.fp16_compress_hook, only=["convergence"])


@pytest.mark.usefixtures("plain_torch")
def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    options = {"max_examples": 2, "only": ["completes", "averages"]}
    check_hook(default_hooks.allreduce_hook, **options)
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    check_hook(default_hooks.allreduce_hook, **options)
    lines = terminal.getvalue().split("\r")
    assert "allreduce_hook: 2 of 2, averages".ljust(79) in lines
    assert lines[-2:] == [" " * 79, ""]  # it is overwritten with blanks


@pytest.mark.usefixtures("plain_torch")
def test_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.kit_verdicts.OURS", {name: OURS[name] for name in ("bf16", "int4")})
    main(["2", "--only", "averages", "--only", "contraction", "--hooks", "gradcomp"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["### gradcomp", ""]
    assert [line.split("|")[1].strip() for line in lines[4:-1]] == ["averages", "contraction"]


def test_a_signature_that_ddp_refuses():
    def hook(state, bucket) -> torch.Tensor:
        return default_hooks.allreduce_hook(state, bucket)

    (failure,) = check_hook(hook, max_examples=2, only=["completes"]).failures
    assert "return annotation should be torch.futures.Future[torch.Tensor]" in failure.message


def test_a_state_in_place_of_its_maker():
    with pytest.raises(TypeError, match="make_state is a function of the process group"):
        check_hook(powerSGD.powerSGD_hook, powerSGD.PowerSGDState(None, start_powerSGD_iter=2))


def pairwise_hook(state, bucket):
    """Use point-to-point communication, which simulated ranks don't have."""
    buffer, other = bucket.buffer(), 1 - dist.get_rank()
    theirs = torch.empty_like(buffer)
    sent = dist.isend(buffer.clone(), other)
    dist.recv(theirs, other)
    sent.wait()
    return done(buffer.add_(theirs).div_(2))


def test_a_hook_that_sends_from_rank_to_rank():
    """The probe for the hook's claims runs on real processes, too."""
    report = check_hook(
        pairwise_hook, world_size=2, max_examples=3, ranks="gloo", only=["completes", "averages"]
    )
    assert [report.verdicts[name].outcome for name in ("completes", "averages")] == ["holds", "holds"]


class Momentum(Keyed, compressors.TopK):
    """Momentum as in DGC, cleared where an element is sent."""

    def total(self, gradient, error):
        self.kept[self.current] = 0.9 * self.kept.get(self.current, 0) + gradient
        return error + self.kept[self.current]

    def error(self, gradient, total, output, sent):
        self.kept[self.current] = self.kept[self.current].where(sent == 0, 0)
        return total - sent


def test_the_factor_that_a_hook_tracks_is_named_in_the_advice():
    def hook(state, bucket, factor=1.0):
        return compressors.hook(state, bucket).then(lambda future: future.value() * factor)

    for factor, state in ((2.0, compressors.TopK), (-1.0, compressors.TopK), (1.0, Momentum)):
        scaled, few = partial(hook, factor=factor), {"max_examples": 6}
        (failure,) = check_hook(scaled, state, only=["held_back_comes_out"], **few).failures
        for tracks in re.findall(r"claim tracks=([\d.]+)", failure.message):
            claims = replace(claims_of(scaled, state), tracks=float(tracks))
            check_hook(scaled, state, claims=claims, only=["tracks_the_mean"], **few).raise_if_failed()
        assert ("tracks=" in failure.message) == (factor > 0)


def test_a_claim_that_another_makes_needless_is_not_suggested():
    only = ["held_back_comes_out", "nonfinite_seen_by_all"]
    report = check_hook(compressors.hook, EF21, max_examples=6, only=only)
    assert [failure.property for failure in report.failures] == only
    assert str(report).endswith("replace(claims_of(hook, make_state), tracks=1)")
