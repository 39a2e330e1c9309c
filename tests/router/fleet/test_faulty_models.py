"""Models that cannot be loaded because of their files or settings, beside others that can."""

import pytest
import structlog
import trio

from fairlead.base.config import Config, ConfigError, NodeConfig
from fairlead.base.errors import FaultyModel, LoadFailed
from fairlead.router.fleet import fleet as fleets
from fairlead.router.fleet.catalog import ModelCatalog
from router.fleet import running_fleet as running
from router.fleet.running_fleet import engine, question, read_fake, running_fleet, sleeper

REASON = "/models/odd/config.json: hidden_size: must be an integer, not 'wide'"


@pytest.fixture
def faulty() -> set[str]:
    """The names of the models that cannot be read."""
    return {"odd"}


@pytest.fixture
def read(monkeypatch, faulty):
    async def read_unless_faulty(model):
        await trio.lowlevel.checkpoint()
        if model.name in faulty:
            raise LoadFailed(REASON)
        return await read_fake(model)

    monkeypatch.setattr(running, "read_fake", read_unless_faulty)
    return read_unless_faulty


@pytest.mark.usefixtures("read")
async def test_faulty_model_is_shown_with_its_problem_and_does_not_stop_the_others():
    odd = engine("odd", preload=True)
    with structlog.testing.capture_logs() as lines:
        async with running_fleet(engine("x", preload=True), odd, sleeper("y")) as opened:
            assert opened.fleet.is_ready
            assert (opened.status("x").state, opened.status("x").problem) == ("ready", None)
            status = opened.status("odd")
            assert status.state == "failed"
            assert status.problem == f"the model odd cannot be loaded: {REASON}"
            assert opened.fleet.problems == {}  # it is no reason to restart the server
            with pytest.raises(FaultyModel, match="the model odd cannot be loaded"):
                await opened.fleet.load("odd")
            with pytest.raises(FaultyModel):  # if it gets to the queue all the same
                await opened.run_job(question(model="odd"))
            assert opened.pid("x") is not None
    logged = [line for line in lines if line["event"] == "model cannot be loaded"]
    assert [(line["model"], line["reason"]) for line in logged] == [("odd", REASON)]


@pytest.mark.usefixtures("read")
async def test_model_is_loaded_once_its_files_are_repaired(monkeypatch, faulty):
    monkeypatch.setattr(fleets, "REREAD_S", 0.05)
    async with running_fleet(engine("x"), engine("odd", preload=True)) as opened:
        faulty.clear()
        await opened.state("odd", "ready")
        assert opened.status("odd").problem is None
        assert opened.fleet.catalog.faults == {}


@pytest.mark.usefixtures("read")
async def test_reload_with_a_new_faulty_model_changes_nothing_and_names_it(faulty):
    async with running_fleet(engine("x")) as opened:
        with pytest.raises(FaultyModel, match=f"the model odd cannot be loaded: {REASON}"):
            await opened.fleet.reload(Config(models=(engine("new"), engine("odd"))))
        assert [status.model for status in opened.fleet.models()] == ["x"]


@pytest.mark.usefixtures("read")
async def test_reload_keeps_a_model_that_stays_faulty_and_uses_one_that_was_repaired(faulty):
    faulty.add("other")
    models = (engine("x"), engine("odd"), engine("other"))
    async with running_fleet(*models) as opened:
        faulty.remove("other")
        await opened.fleet.reload(Config(models=(*models, engine("new"))))
        states = {status.model: status.state for status in opened.fleet.models()}
        assert states == {"x": "stopped", "odd": "failed", "other": "stopped", "new": "stopped"}
        await opened.fleet.load("other")


async def test_start_is_refused_if_the_only_model_is_faulty_with_its_own_error(read):
    with pytest.raises(LoadFailed) as refused:
        await ModelCatalog(Config(models=(engine("odd"),)), read).read_all()
    assert refused.value.message == REASON

    async def refuse(_model):
        await trio.lowlevel.checkpoint()
        raise ConfigError("maxModelLen: no")

    with pytest.raises(ConfigError):
        await ModelCatalog(Config(models=(engine("odd"),)), refuse).read_all()


async def test_start_is_refused_if_all_models_are_faulty_unless_there_are_nodes(read, faulty):
    faulty.add("other")
    models = (engine("odd"), engine("other"))
    with pytest.raises(LoadFailed) as refused:
        await ModelCatalog(Config(models=models), read).read_all()
    assert [line.split(":")[0] for line in refused.value.message.splitlines()] == [
        f"the model {name} cannot be loaded" for name in ("odd", "other")
    ]
    node = NodeConfig(id="n", url="http://127.0.0.1:9")
    readings = await ModelCatalog(Config(models=models, nodes=(node,)), read).read_all()
    assert (list(readings.texts), list(readings.faults)) == ([], ["odd", "other"])
