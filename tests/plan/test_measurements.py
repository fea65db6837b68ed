"""Test that a written file of measurements is read, and any other file is refused with the reason."""

import json

import pytest

from gradcomp.plan.candidates import Collective
from gradcomp.plan.measurements import Measurements
from tests.plan.measured import LINK, NODES_LINK, as_written, as_written_with_nodes


def test_what_is_written_is_read(tmp_path):
    read = Measurements.checked(as_written())
    path = tmp_path / "measured.json"
    read.write(path)
    assert Measurements.read(path) == read
    assert [bucket.ready_at for bucket in read.buckets()] == [0.25, 1.0]
    assert read.numel == 8_002_001
    assert read.step_s("int4") == 0.5
    assert read.step_s("fp16") is None


def test_the_link_is_fitted():
    found = Measurements.checked(as_written()).fitted_link()
    assert found.bytes_per_s == pytest.approx(LINK.bytes_per_s)
    assert found.latency_s == pytest.approx(LINK.latency_s)
    assert not found.has_tree
    assert not found.has_delay
    on_nccl = Measurements.checked(as_written() | {"backend": "nccl", "round_trip_s": 0.0}).fitted_link()
    assert on_nccl.has_tree
    assert on_nccl.latency_s == pytest.approx(LINK.latency_s), "of the all-reduces"
    delayed = Measurements.checked(as_written() | {"round_trip_s": 0.05}).fitted_link()
    assert delayed.has_delay
    assert delayed.latency_s == 0.05
    assert delayed.rate(Collective("all-gather", 1)).latency_s == pytest.approx(LINK.latency_s)


def test_the_link_within_and_between_nodes_is_fitted():
    found = Measurements.checked(as_written_with_nodes()).fitted_link()
    assert found.nodes.ranks == 2
    assert found.nodes.within_bytes_per_s == pytest.approx(NODES_LINK.nodes.within_bytes_per_s)
    assert len(found.measured) == 9
    for (_, group), rate in found.measured.items():
        usual = NODES_LINK.nodes.within_bytes_per_s if group == "within" else NODES_LINK.bytes_per_s
        assert rate.bytes_per_s == pytest.approx(usual)
        assert rate.latency_s == pytest.approx(NODES_LINK.latency_s)


def test_a_link_with_nodes_needs_all_reduces_within():
    given = as_written_with_nodes()
    given["link"] = [each for each in given["link"] if each["group"] != "within"]
    with pytest.raises(ValueError, match="link has no all-reduce within a node"):
        Measurements.checked(given).fitted_link()


def test_hooks_own_work_is_per_element():
    device = Measurements.checked(as_written()).measured_device()
    assert device.local_ns == {
        "none": 0.0,
        "int4": pytest.approx(0.02 / 8_002_001 * 1e9),
        "bf16": pytest.approx(0.003 / 8_002_001 * 1e9),
    }
    assert device.is_inline
    assert not Measurements.checked(as_written() | {"device_type": "cuda"}).measured_device().is_inline


def test_buckets_without_measured_times_are_ready_by_their_elements():
    read = Measurements.checked(as_written() | {"ready_at": []})
    assert [bucket.ready_at for bucket in read.buckets()] == [
        pytest.approx(6_000_001 / 8_002_001),
        1.0,
    ]


def changed(path, value):
    """Return the file with one value replaced; path: keys separated by dots."""
    given = as_written()
    *parents, last = path.split(".")
    place = given
    for key in parents:
        place = place[int(key) if key.isdecimal() else key]
    place[int(last) if last.isdecimal() else last] = value
    return given


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 1, "format is 1; this gradcomp reads 2"),
        ("backward_s", "0.1", "backward_s is '0.1'; it must be a finite number"),
        ("backward_s", float("nan"), "backward_s is nan; it must be a finite number"),
        ("backward_s", -0.1, "backward_s is -0.1; it must not be negative"),
        ("round_trip_s", -0.1, "round_trip_s is -0.1; it must not be negative"),
        ("backward_s", True, "backward_s is True; it must be a finite number"),
        ("world_size", 0, "world_size is 0; it must be at least 1"),
        ("world_size", 2.5, "world_size is 2.5; it must be a whole number"),
        ("ranks_per_node", 0, "ranks_per_node is 0; it must be at least 1"),
        ("ranks_per_node", 3, "ranks_per_node is 3; it must divide world_size, 4"),
        ("dtype", "int8", "dtype is 'int8'; it must be one of float32"),
        ("model", None, "model is None; it must be a string"),
        ("versions.torch", 2.13, r"versions\.torch is 2\.13; it must be a string"),
        ("shapes", [], r"shapes is \[\]; it must hold at least one parameter"),
        ("shapes", 3, "shapes is 3; it must be a list"),
        ("shapes", "ab", "shapes is 'ab'; it must be a list"),
        ("shapes.0", [3, 0], r"shapes\[0\] is \[3, 0\]; it must have no length below 1"),
        ("shapes.0", ["3"], r"shapes\[0\]\[0\] is '3'; it must be a whole number"),
        ("ready_at", [0.5], r"ready_at is \[0\.5\]; it must have 2 values, one for each bucket"),
        ("ready_at", [0.5, 0.2], r"ready_at is \[0\.5, 0\.2\]; it must rise from 0 to 1"),
        ("ready_at", [0.5, 1.2], r"ready_at is \[0\.5, 1\.2\]; it must rise from 0 to 1"),
        ("bucket_cap_mb", 0, "bucket_cap_mb is 0.0; it must be positive"),
        ("link.1", 5, r"link\[1\] is 5; it must be an object"),
        ("link.1.kind", "send", r"link\[1\]: kind is 'send'; it must be one of all-reduce"),
        ("link.1.kind", 3, r"link\[1\]\.kind is 3; it must be a string"),
        ("link.1.group", "here", r"link\[1\]: group is 'here'; it must be one of all, within, between"),
        ("link.1.seconds", 0, r"link\[1\]: seconds is 0\.0; it must be positive"),
        ("hooks.1.name", "none by nodes", r"hooks\[1\]: none can't be by nodes"),
        ("hooks.1.name", "int2", r"hooks\[1\]: there is no hook 'int2'"),
        ("hooks.2.step_p50_s", 0, r"hooks\[2\]: step_p50_s is 0\.0; it must be positive"),
        ("hooks.2.color", "red", r"hooks\[2\] has 'color', which are unknown here"),
        ("color", "red", "the file has 'color', which are unknown here"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, path, value, message):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ValueError, match=message) as raised:
        Measurements.read(file)
    assert str(raised.value).startswith(f"{file} isn't what `python -m gradcomp bench` writes: ")


def test_what_is_missing_is_named(tmp_path):
    given = as_written()
    del given["backward_s"], given["link"]
    with pytest.raises(ValueError, match="the file lacks backward_s, link"):
        Measurements.checked(given)
    given = as_written()
    del given["hooks"][0]["local_s"]
    assert Measurements.checked(given).hooks[0].local_s is None
    del given["hooks"][0]["name"]
    with pytest.raises(ValueError, match=r"hooks\[0\] lacks name"):
        Measurements.checked(given)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "isn't JSON: "),
        (b"", "isn't JSON: "),
        (b"\xff\xfe", "can't be read: "),
        (b"[]", r"the file is \[\]; it must be an object"),
        (b"null", "the file is None; it must be an object"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, content, message):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Measurements.read(path)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"can't be read: .*No such file"):
        Measurements.read(tmp_path / "absent.json")


def test_a_link_needs_all_reduces():
    given = as_written()
    given["link"] = [each for each in given["link"] if each["kind"] != "all-reduce"]
    with pytest.raises(ValueError, match="link has no all-reduce"):
        Measurements.checked(given).fitted_link()
