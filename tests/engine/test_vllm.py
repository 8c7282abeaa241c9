"""The client of vLLM against servers on real sockets: what it sends, what it reads, and what it refuses and why."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest
from fake_vllm import EXPERTS_PER_TOKEN, LAYERS, STOPS, VOCAB, FakeVllm, log_softmax
from serving import reserved_port, serving, serving_one

from poise.config import ConfigError
from poise.engine.answers import decoded_routes, signed_seed
from poise.engine.http import EngineError, Marks, Outage, Servers
from poise.engine.vllm import VllmEngine

PROMPT = [3, 1, 4, 1, 5]


def client(urls, *, temperature=1.0, routes=False, **settings):
    told = []
    settings = {"timeout_s": 300.0, "retries": 3, "max_wait_s": 300.0, "tell": told.append} | settings
    engine = VllmEngine(
        Servers(urls, **settings),
        stop_ids=STOPS,
        vocab_size=VOCAB,
        temperature=temperature,
        routes_shape=(LAYERS, EXPERTS_PER_TOKEN) if routes else None,
    )
    engine.told = told
    return engine


def with_client(work, *fakes, **settings):
    """What ``work(engine)`` returns, with its connections closed afterwards."""

    async def main(urls):
        engine = client(urls, **settings)
        try:
            return await work(engine)
        finally:
            await engine.close()

    with serving(*fakes) as urls:
        return asyncio.run(main(urls))


async def act(engine, *, episode_id="e", seed=7, max_tokens=6):
    return await engine(PROMPT, episode_id=episode_id, seed=seed, max_tokens=max_tokens)


def test_it_samples_tokens_with_the_log_probs_of_the_tempered_distribution():
    fake = FakeVllm()
    action = with_client(act, fake, temperature=0.7)
    stream = [*PROMPT, *action.token_ids]
    # By hand: each log-prob is that of softmax(row of the last token / 0.7).
    expected = [log_softmax(fake.table[a] / 0.7)[b] for a, b in itertools.pairwise(stream[4:])]
    assert action.log_probs == pytest.approx(expected, abs=1e-12)
    assert action.is_stopped == (action.token_ids[-1] in STOPS)
    (body,), (headers,) = fake.seen, fake.headers
    assert body["token_ids"] == PROMPT
    assert headers["x-session-id"] == "e"
    sampling = body["sampling_params"]
    assert sampling["temperature"] == 0.7
    assert sampling["stop_token_ids"] == sorted(STOPS)
    # Whatever a server would take from generation_config.json is said, and its own stop ids are off.
    said = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    assert said.items() <= sampling.items()


def test_an_action_ends_at_a_stop_id_and_the_stop_id_belongs_to_it():
    actions = [with_client(lambda e, s=s: act(e, seed=s, max_tokens=200), FakeVllm()) for s in range(3)]
    assert all(action.is_stopped and action.token_ids[-1] in STOPS for action in actions)
    assert not any(set(action.token_ids[:-1]) & set(STOPS) for action in actions)
    cut = with_client(lambda e: act(e, max_tokens=1), FakeVllm())
    assert (len(cut.token_ids), cut.is_stopped) == (1, cut.token_ids[0] in STOPS)


def test_a_seed_is_sent_as_the_signed_number_of_the_same_bits():
    # -1 switches vLLM's seeding off.
    cases = {0: 0, 2**63 - 1: 2**63 - 1, 2**63: -(2**63), 2**64 - 2: -2, 2**64 - 1: -2}
    assert {seed: signed_seed(seed) for seed in cases} == cases
    fake = FakeVllm()
    with_client(lambda e: act(e, seed=2**63 + 5), fake)
    assert fake.seen[0]["sampling_params"]["seed"] == -(2**63) + 5


def test_routes_are_those_of_the_inputs_that_predicted_each_token():
    action = with_client(act, FakeVllm(), routes=True)
    assert action.routes.dtype == np.int16
    assert action.routes.shape == (len(PROMPT) + len(action.token_ids) - 1, LAYERS, EXPERTS_PER_TOKEN)
    # The fake's rule: row i, layer l, place a is (10 l + a + i) % 7.
    assert action.routes[4].tolist() == [[4, 5], [0, 1], [3, 4]]
    assert with_client(act, FakeVllm()).routes is None


@pytest.mark.parametrize(("rows", "text"), [(3, "!"), (3, "AAAA"), (2, None)])
def test_routes_that_are_none_are_refused(rows, text):
    text = FakeVllm().routes(3) if text is None else text
    with pytest.raises(EngineError, match="routed experts"):
        decoded_routes(text, where="w", num_rows=rows, num_layers=LAYERS, experts_per_token=EXPERTS_PER_TOKEN)


def test_scores_are_the_log_probs_of_the_prompt():
    fake = FakeVllm()
    scores = with_client(lambda e: e.score(PROMPT), fake, temperature=0.5)
    # At temperature 1, whatever the rollouts' is.
    assert scores == pytest.approx([log_softmax(fake.table[a])[b] for a, b in [(3, 1), (1, 4), (4, 1), (1, 5)]])


def shake(**fake):
    routes = fake.pop("routes", False)
    with_client(lambda e: e.handshake(max_context_tokens=1024), FakeVllm(**fake), routes=routes)


@pytest.mark.parametrize("routes", [False, True])
def test_an_honest_server_passes_the_handshake(routes):
    shake(routes=routes)


REFUSED = {
    "no ids": "without token ids",
    "one id less": "token ids and",
    "no log-probs": "without log-probs",
    "missing log-prob": "log-prob -9999.0: it is missing",
    "nan": "which is no number",
    "logits": "logits, not log-probs",
    "other id named": "is of token_id:1000",
    "abort": "aborted",
    "cut short": "without a stop id",
    "eos": "none of the stop ids",
    "top-k": "no probability at all.*generation_config",
    "top-p": "nats above its scores.*generation_config",
    "raw": "processed_logprobs",
    "top-k raw": "processed_logprobs",
    "nan score": "prompt token 3 has the log-prob None",
    "any token": "another vocabulary: it takes token 40",
}


@pytest.mark.parametrize("defect", REFUSED)
def test_a_defect_is_refused_by_the_handshake_with_its_reason(defect):
    with pytest.raises(EngineError, match=REFUSED[defect]):
        shake(defect=defect)


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ({"vocab": 39}, "does not know token 39"),
        ({"vocab": 41}, "it takes token 40"),
        ({"context": 1000}, "holds 1000 tokens, and rollout.max_context_tokens is 1024"),
        ({"defect": "no routes", "routes": True}, "--enable-return-routed-experts"),
        ({"defect": "short routes", "routes": True}, r"shape \[2, 3, 2\]"),
        ({"defect": "float routes", "routes": True}, "not whole numbers"),
    ],
)
def test_another_model_is_refused_by_the_handshake(fake, reason):
    with pytest.raises(EngineError, match=reason):
        shake(**fake)


def test_a_server_that_is_not_healthy_is_waited_for_and_then_named():
    with pytest.raises(EngineError, match=r"has not answered for 0.2 s \(engine.max_wait_s\).*503"):
        with_client(lambda e: e.handshake(max_context_tokens=1024), FakeVllm("ill"), max_wait_s=0.2)


def test_transport_errors_are_tried_again_and_refusals_are_not():
    fake = FakeVllm()
    fake.fail_next = 2
    action = with_client(act, fake)
    assert action == with_client(act, FakeVllm())  # the same seed: the failed tries left no trace
    assert len(fake.seen) == 3
    fake = FakeVllm()
    fake.fail_next = 99
    with pytest.raises(EngineError, match=r"failed 4 times.*EngineDeadError.*engine.retries 3"):
        with_client(act, fake)
    assert len(fake.seen) == 4
    fake = FakeVllm(vocab=5)
    with pytest.raises(EngineError, match=r"refused: 400: .*out of vocabulary"):
        with_client(act, fake)
    assert len(fake.seen) == 1


def test_an_answer_that_takes_too_long_is_asked_for_again():
    fake = FakeVllm()

    async def work(engine):
        fake.hold = asyncio.Event()  # never set: the first request gets no answer
        task = asyncio.create_task(act(engine))
        while not fake.seen:
            await asyncio.sleep(0.01)
        fake.hold = None
        return await task

    # A machine that stands still for longer than this may need several more tries.
    assert with_client(work, fake, timeout_s=0.3, retries=1000) == with_client(act, FakeVllm())
    assert len(fake.seen) >= 2
    assert all(body == fake.seen[0] for body in fake.seen)


def test_an_episode_stays_with_its_server_and_episodes_are_spread_evenly():
    fakes = [FakeVllm(), FakeVllm(), FakeVllm()]

    async def work(engine):
        for _ in range(2):
            await asyncio.gather(*(act(engine, episode_id=f"{i}") for i in range(12)))

    with_client(work, *fakes)
    episodes = [sorted(headers["x-session-id"] for headers in fake.headers) for fake in fakes]
    assert [len(set(ids)) for ids in episodes] == [4, 4, 4]
    assert all(ids[::2] == ids[1::2] for ids in episodes)  # both turns of each
    assert sorted(i for ids in episodes for i in set(ids)) == sorted(str(i) for i in range(12))


def test_an_episode_moves_on_when_its_server_dies_and_nobody_waits():
    alive = FakeVllm()

    async def main(urls, stop):
        engine = client(urls, max_wait_s=300.0)
        for i in range(4):
            await act(engine, episode_id=f"{i}")
        stop.close()
        actions = [await act(engine, episode_id=f"{i}") for i in range(4)]
        await engine.close()
        return actions, engine.told

    with serving(alive) as urls, contextlib.ExitStack() as stop:
        dying = stop.enter_context(serving_one(FakeVllm()))
        actions, told = asyncio.run(main([dying, *urls], stop))
    assert len(actions) == 4
    assert len(alive.seen) == 2 + 4
    assert any("trying again" in line for line in told)


def test_a_server_that_comes_back_with_other_weights_gets_them_before_it_samples():
    second = FakeVllm(name="default")
    restored = []

    async def main(port, first_server):
        engine = client([f"http://127.0.0.1:{port}"], max_wait_s=300.0)

        async def restore(url):
            # Nothing may have been sampled from the weights it came back with.
            restored.append(len([body for body in second.seen if body["sampling_params"].get("logprobs") == 0]))
            await engine.write_mark(url, "run-3")

        engine.servers.marks = Marks(read=engine.read_mark, restore=restore)
        await engine.set_policy_version(3, mark="run-3")
        engine.servers.valid_marks = frozenset({"run-3"})
        before = await act(engine)
        first_server.__exit__(None, None, None)
        waiting = asyncio.create_task(act(engine))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        with serving_one(second, port):
            after = await waiting
            await engine.close()
        return before, after

    with reserved_port() as port:
        first = serving_one(FakeVllm(), port)
        first.__enter__()
        before, after = asyncio.run(main(port, first))
    assert restored == [0]
    assert second.mark == "run-3"
    assert after == before
    assert after.policy_version == 3


def test_an_answer_of_a_process_without_the_current_weights_is_thrown_away():
    fake = FakeVllm()

    async def work(engine):
        async def restore(url):
            await engine.write_mark(url, "run-1")

        engine.servers.marks = Marks(read=engine.read_mark, restore=restore)
        engine.servers.valid_marks = frozenset({"run-1"})
        return await act(engine)

    action = with_client(work, fake)  # it answers at once, but calls its weights "default"
    assert fake.mark == "run-1"
    assert len(fake.seen) == 2
    assert action == with_client(act, FakeVllm())


def test_a_server_that_is_lost_again_while_it_is_welcomed_back_is_not_forgotten():
    async def work(engine):
        servers, read = engine.servers, asyncio.Event()
        (server,) = servers.all

        async def read_mark(url):
            read.set()
            return "run-1"

        servers.marks = Marks(read=read_mark, restore=pytest.fail)
        servers.valid_marks = frozenset({"run-1"})
        state = servers._loop_state()
        async with state.changed:  # as whoever is just waking up: the server is found well, and nobody is told yet
            await servers._suspect(server, Outage("gone"))
            await read.wait()
            await servers._suspect(server, Outage("gone again"))
        await asyncio.gather(*state.tasks)
        return server.is_ready

    assert with_client(work, FakeVllm())


def test_without_a_way_to_restore_the_weights_it_says_so():
    async def work(engine):
        async def restore(url):
            raise Outage("gone again")

        engine.servers.marks = Marks(read=engine.read_mark, restore=restore)
        engine.servers.valid_marks = frozenset({"run-1"})
        return await act(engine)

    with pytest.raises(EngineError, match=r"no engine server was ready for 0.5 s"):
        with_client(work, FakeVllm(), max_wait_s=0.5)


def test_pause_and_resume_reach_every_server():
    fakes = [FakeVllm(), FakeVllm()]

    async def work(engine):
        await engine.pause()
        assert [fake.paused for fake in fakes] == ["keep", "keep"]
        await engine.resume()

    with_client(work, *fakes)
    assert [fake.paused for fake in fakes] == [False, False]


@pytest.mark.parametrize(
    ("urls", "reason"),
    [([], "is empty"), (["localhost:8000"], "http://"), (["http://a", "http://a"], "twice")],
)
def test_urls_that_cannot_work_are_refused(urls, reason):
    with pytest.raises(ConfigError, match=f"engine.urls.*{reason}"):
        Servers(urls)
