"""What has happened to a local model since the server was started, for people and telemetry. Pure."""

from fairlead.router.fleet.status import LifetimeCounts, LoadStatus


class ModelHistory:
    """The counts of a model, its latest load, and the `problem` that ended its last instance.

    The problem is None while the model is loaded, and from the beginning of its next load.
    """

    def __init__(self) -> None:
        self.counts = LifetimeCounts()
        self.load = LoadStatus()
        self.problem: str | None = None
        self.stuck: str | None = None  # why an instance was given up, until another one is loaded

    def load_began(self, progress: float | None, stage: str) -> None:
        """Record that an instance is to be loaded."""
        self.problem = None
        self.load_progressed(progress, stage)

    def load_progressed(self, progress: float | None, stage: str) -> None:
        """Record the progress of a load; 0 and "" once there is no instance."""
        self.load = LoadStatus(progress=progress, stage=stage, duration_s=self.load.duration_s)

    def loaded(self, duration_s: float, *, is_restart: bool) -> None:
        """Record the end of a load, which may have replaced an instance that died."""
        self.load = LoadStatus(progress=1.0, stage=self.load.stage, duration_s=round(duration_s, 3))
        self.counts.loads += 1
        self.counts.restarts += is_restart
        self.problem = self.stuck = None

    def load_failed(self, problem: str) -> None:
        """Record that a load has failed."""
        self.problem = problem
        self.counts.load_failures += 1

    def died(self, problem: str, stuck: str | None) -> None:
        """Record the death of a loaded instance; `stuck` is why it was given up, if it was."""
        self.problem = problem
        if stuck is not None:
            self.counts.stuck += 1
            self.stuck = stuck
