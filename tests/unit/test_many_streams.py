"""Many streams: each is as if it were alone, room is bounded, and states can be saved."""

import copy

import pytest
import torch
from streaming import frames, knowing_its_source, outputs
from torch import nn

import ttnorm
from ttnorm.stream import stream_of
from ttnorm.stream_config import MEMORIES


@pytest.fixture
def network(small_network):
    return knowing_its_source(small_network)


@pytest.mark.parametrize("memory", MEMORIES)
def test_many_streams_in_one_forward_are_as_if_each_ran_alone(network, memory):
    a, b, c = frames(30), frames(30, 0.0, 0.2), frames(30, 0.6, 1.0)
    ttnorm.stream_(network, memory=memory)
    alone = []
    for x in (a, b, c):
        ttnorm.reset_stream_(network)
        alone.append(outputs(network, x, 3))
    ttnorm.reset_stream_(network)
    together = []
    for parts in zip(a.split(3), b.split(3), c.split(3), strict=True):
        order = torch.randperm(9)
        with ttnorm.streams(network, [("a", "b", "c")[i // 3] for i in order]):
            together.append(network(torch.cat(parts)[order])[order.argsort()])
    for index, expected in enumerate(alone):
        actual = torch.cat([part[3 * index : 3 * index + 3] for part in together])
        # within three frames of one stream the order is another
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_streams_end_with_their_context(network):
    ttnorm.stream_(network)
    network(frames(2))
    with ttnorm.streams(network, ["x"] * 3):
        network(frames(3))
    network(frames(4))
    assert {one: h.frames for one, h in ttnorm.health(network).items()} == {"x": 3, None: 6}


class TestManyStreams:
    def test_the_one_unused_for_longest_is_forgotten_first(self, network):
        ttnorm.stream_(network, max_streams=3)
        for one in ("a", "b", "c", "a", "d", "e"):
            with ttnorm.streams(network, [one]):
                network(frames(1))
        assert list(ttnorm.health(network)) == ["a", "d", "e"]
        assert len(stream_of(network).rows) <= 3

    def test_as_many_as_there_is_room_for_are_all_remembered(self, network):
        """Forwards without ids, which may never come, take no place between those with."""
        ttnorm.stream_(network, max_streams=2)
        for _ in range(5):
            with ttnorm.streams(network, ["a", "b"]):
                network(frames(2))
        assert [state.frames for state in ttnorm.health(network).values()] == [5, 5]
        network(frames(1))
        assert list(ttnorm.health(network)) == ["b", None]

    def test_memory_is_bounded(self, network):
        ttnorm.stream_(network, max_streams=5)
        for one in range(40):
            with ttnorm.streams(network, [one]):
                network(frames(1))
        assert len(stream_of(network).state["mean"]) == 5

    def test_a_stream_that_comes_back_starts_anew(self, network):
        x = frames(2)
        ttnorm.stream_(network, max_streams=2)
        with ttnorm.streams(network, ["a"]):
            first = network(x)
        for one in ("b", "c"):
            with ttnorm.streams(network, [one]):
                network(frames(5, 0.9, 1.0))
        with ttnorm.streams(network, ["a"]):
            torch.testing.assert_close(network(x), first)

    def test_reset_forgets_the_streams_it_is_given(self, network):
        ttnorm.stream_(network)
        with ttnorm.streams(network, ["a", "b"]):
            network(frames(2))
        ttnorm.reset_stream_(network, ["a"])
        assert list(ttnorm.health(network)) == ["b"]
        with pytest.raises(ValueError, match="no stream 'a'"):
            ttnorm.reset_stream_(network, ["a"])
        ttnorm.reset_stream_(network)
        assert ttnorm.health(network) == {}

    def test_too_many_or_too_few_ids(self, network):
        ttnorm.stream_(network, max_streams=2)
        with (
            pytest.raises(ValueError, match="3 streams in one batch, expected at most 2"),
            ttnorm.streams(network, ["a", "b", "c"]),
        ):
            pass
        with (
            ttnorm.streams(network, ["a", "b"]),
            pytest.raises(ValueError, match="2 ids for a batch of 3"),
        ):
            network(frames(3))


class TestState:
    @pytest.mark.parametrize("memory", MEMORIES)
    def test_goes_on_in_another_process(self, network, memory, tmp_path):
        other = copy.deepcopy(network)
        ttnorm.stream_(network, memory=memory, window=30)
        with ttnorm.streams(network, ["a", 7] * 5):
            network(frames(10))
        ttnorm.save_stream(network, tmp_path / "streams")
        ttnorm.load_stream_(other, tmp_path / "streams")
        x = frames(10)
        with ttnorm.streams(network, ["a", 7] * 5), ttnorm.streams(other, ["a", 7] * 5):
            assert torch.equal(network(x), other(x))
        assert ttnorm.health(network) == ttnorm.health(other)

    def test_of_another_network_is_refused(self, network, tmp_path):
        ttnorm.stream_(network, memory="balanced")
        ttnorm.save_stream(network, tmp_path / "streams")
        other = ttnorm.convert_(nn.Sequential(nn.BatchNorm2d(3)), 0.1)
        with pytest.raises(ValueError, match="made for another network: 2 layers there, 1 here"):
            ttnorm.load_stream_(other, tmp_path / "streams")
        ttnorm.save(network, tmp_path / "alpha")
        with pytest.raises(ValueError, match="holds no streams"):
            ttnorm.load_stream_(network, tmp_path / "alpha")
        state = stream_of(network).memory_state()
        ttnorm.stream_(other, memory="balanced")
        with pytest.raises(ValueError, match=r"shape \(1, 10, 14\), expected \(1, 10, 3\)"):
            stream_of(other).load_memory_state(state)

    def test_an_id_that_no_file_can_hold_is_refused(self, network, tmp_path):
        ttnorm.stream_(network)
        with ttnorm.streams(network, [(1, 2)]):
            network(frames(1))
            with pytest.raises(TypeError, match=r"\(1, 2\) cannot be saved"):
                ttnorm.save_stream(network, tmp_path / "streams")

    def test_a_copy_remembers_on_its_own(self, network):
        ttnorm.stream_(network)
        network(frames(3))
        other = copy.deepcopy(network)
        other(frames(4))
        assert [ttnorm.health(m)[None].frames for m in (network, other)] == [3, 7]
        ttnorm.end_stream_(other)
        other(frames(2))
        network(frames(1))
        assert ttnorm.health(network)[None].frames == 4

    def test_is_no_part_of_the_network_s_weights(self, network):
        before = network.state_dict().keys()
        ttnorm.stream_(network)
        network(frames(3))
        assert network.state_dict().keys() == before
        assert len(list(network.children())) == 9  # a Sequential still runs its own layers only


def test_a_stream_that_is_named_twice_is_reset_once(network):
    ttnorm.stream_(network)
    with ttnorm.streams(network, ["a", "b"]):
        network(frames(2))
    ttnorm.reset_stream_(network, ["a", "a"])
    assert list(ttnorm.health(network)) == ["b"]


def test_ids_are_told_apart_by_their_values(network):
    """As a loader gives them: in a tensor, an array, or as numbers of these."""
    ttnorm.stream_(network)
    ids = torch.tensor([0, 1, 0])
    for given in (ids, ids.numpy(), list(ids), list(ids.numpy()), [0, 1, 0]):
        with ttnorm.streams(network, given):
            network(frames(3))
    assert {one: health.frames for one, health in ttnorm.health(network).items()} == {0: 10, 1: 5}
    ttnorm.reset_stream_(network, torch.tensor([1]))
    assert list(ttnorm.health(network)) == [0]


def test_one_name_is_no_list_of_ids(network):
    ttnorm.stream_(network)
    refused = pytest.raises(ValueError, match="ids is 'door', expected one for each sample")
    with refused, ttnorm.streams(network, "door"):
        network(frames(4))


@pytest.mark.parametrize("again", ["load_stream_", "stream_"])
def test_a_memory_that_is_replaced_keeps_to_the_streams_it_is_in(network, tmp_path, again):
    ttnorm.stream_(network)
    ttnorm.save_stream(network, tmp_path / "empty.safetensors")
    with ttnorm.streams(network, ["door"]):
        if again == "stream_":
            ttnorm.stream_(network)
        else:
            ttnorm.load_stream_(network, tmp_path / "empty.safetensors")
        network(frames(1))
    network(frames(1))
    assert {id: state.frames for id, state in ttnorm.health(network).items()} == {
        "door": 1,
        None: 1,
    }


def test_a_memory_may_end_inside_its_streams(network):
    ttnorm.stream_(network)
    with ttnorm.streams(network, ["door"]):
        ttnorm.end_stream_(network)
    assert network(frames(2)).shape == (2, 4)


def test_any_number_of_streams_compiles_once(network):
    ttnorm.stream_(network, memory="corrected")
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = torch.compile(network, backend=backend)
    for count in (1, 2, 3, 4, 5):  # the first is a case of its own, as for any network
        with ttnorm.streams(network, range(count)):
            model(frames(count))
    assert len(compiled) == 2


def test_frames_after_the_streams_of_others_count_as_use(network):
    ttnorm.stream_(network, memory="pool", max_streams=2)
    network(frames(1))
    with ttnorm.streams(network, ["door"]):
        network(frames(1))
    network(frames(1))  # of None, again
    with ttnorm.streams(network, ["yard"]):
        network(frames(1))
    assert {id: state.frames for id, state in ttnorm.health(network).items()} == {
        None: 2,
        "yard": 1,
    }


def test_a_stream_that_has_to_be_forgotten_is_told_of_once(network, caplog):
    ttnorm.stream_(network, memory="pool", max_streams=2)
    for camera in ("a", "b", "c", "d"):
        with ttnorm.streams(network, [camera]):
            network(frames(1))
    assert caplog.text.count("is forgotten, for there are more than max_streams=2") == 1


def test_who_is_forgotten_is_said_and_nobody_who_never_came(network, caplog):
    ttnorm.stream_(network, max_streams=2)
    with ttnorm.streams(network, ["door", "yard"]):
        network(frames(2))
    assert not caplog.text
    with ttnorm.streams(network, ["roof"]):
        network(frames(1))
    assert "stream 'door' is forgotten" in caplog.text


def test_a_limit_can_be_raised_when_streams_come_back(network, tmp_path):
    ttnorm.stream_(network, max_streams=2)
    with ttnorm.streams(network, ["door", "yard"]):
        network(frames(2))
    ttnorm.save_stream(network, tmp_path / "streams.safetensors")
    other = ttnorm.stream_(copy.deepcopy(network), max_streams=3)
    ttnorm.load_stream_(other, tmp_path / "streams.safetensors")
    with ttnorm.streams(other, ["roof"]):
        other(frames(1))
    assert list(ttnorm.health(other)) == ["door", "yard", "roof"]
    ttnorm.load_stream_(ttnorm.stream_(other, max_streams=1), tmp_path / "streams.safetensors")
    assert list(ttnorm.health(other)) == ["door", "yard"]
