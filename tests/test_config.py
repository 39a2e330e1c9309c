"""Settings that contradict each other are found when the configuration is made."""

from pathlib import Path

import pytest

from fairlead.config import ApiKey, Config, ConfigError, KeyLimits, ModelConfig, QueueConfig

MODELS = (ModelConfig(path=Path(), name="m"),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"queue": QueueConfig(classes=())}, "queue.classes: must be one name or more"),
        ({"queue": QueueConfig(classes=("a", "a"))}, "queue.classes: .* all different"),
        (
            {"api_keys": (ApiKey("a"), ApiKey("b", priority="urgent"))},
            r"apiKeys\[1\].priority: must be one of high, normal, low",
        ),
        (
            {"api_keys": (ApiKey("a", limits=KeyLimits(requests_per_minute=0)),)},
            r"apiKeys\[0\].limits.requestsPerMinute: must be at least 1",
        ),
        (
            {"api_keys": (ApiKey("a", limits=KeyLimits(concurrent=-1)),)},
            r"apiKeys\[0\].limits.concurrent: must be at least 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config(models=MODELS, **settings)


def test_priorities_are_checked_against_the_configured_classes():
    queue = QueueConfig(classes=("paid", "free"))
    assert Config(models=MODELS, queue=queue, api_keys=(ApiKey("a", priority="free"),)).queue is queue


@pytest.mark.parametrize(
    ("classes", "expected"),
    [(("one",), "one"), (("high", "low"), "low"), (("high", "normal", "low"), "normal")],
)
def test_the_default_class_is_the_middle_one(classes, expected):
    assert expected == classes[QueueConfig(classes=classes).default_class]
