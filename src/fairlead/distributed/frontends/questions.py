"""What fronts may call in the dispatcher's process: questions, which it answers at once, and orders."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import trio

from fairlead.base.errors import FairleadError, QueueFull
from fairlead.base.supervision import contain
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.front import Front

MAX_ORDERS = 64  # of a front, at a time; a correct one stays below it

Questions = Mapping[str, Callable[..., Any]]
Orders = Mapping[str, Callable[..., Awaitable[Any]]]


class FrontQuestions:
    """Answers the questions of fronts, and executes their orders.

    `questions` are functions, which get the front's name first, and `orders` are those which take time. Both
    may raise a `FairleadError`, which the front gets.
    """

    def __init__(self, questions: Questions, orders: Orders) -> None:
        self._questions = questions
        self._orders = orders

    def answer(self, front: Front, asked: wire.Ask, nursery: trio.Nursery) -> None:
        """Answer a question, or execute an order in a task of `nursery`."""
        if asked.question in self._questions:
            self._answer(front, asked)
        elif asked.question not in self._orders:
            front.refuse(f"there is no question {asked.question!r}")
        elif front.orders < MAX_ORDERS:
            front.orders += 1
            nursery.start_soon(contain, "order of a front", self._execute, front, asked)
        else:
            _send(front, asked, QueueFull(f"this front has {MAX_ORDERS} orders already"))

    def _answer(self, front: Front, asked: wire.Ask) -> None:
        try:
            value = self._questions[asked.question](front.name, *asked.arguments)
        except FairleadError as error:
            _send(front, asked, error)
        except (TypeError, msgspec.ValidationError) as error:
            front.refuse(_invalid(asked), error)
        else:
            _send(front, asked, None, value)

    async def _execute(self, front: Front, asked: wire.Ask) -> None:
        """Execute an order, also if its front has gone meanwhile, and answer it."""
        error: FairleadError | None = FairleadError("the order was not executed: internal error")
        value: Any = None
        try:
            value = await self._orders[asked.question](*asked.arguments)
            error = None
        except FairleadError as raised:
            error = raised
        except (TypeError, msgspec.ValidationError) as raised:
            front.refuse(_invalid(asked), raised)
        finally:  # also after a bug: the front waits without a limit
            front.orders -= 1
            _send(front, asked, error, value)


def _send(front: Front, asked: wire.Ask, error: FairleadError | None, value: Any = None) -> None:
    front.send(wire.Answered(asked.number, value, None if error is None else wire.ErrorValue.of(error)))


def _invalid(asked: wire.Ask) -> str:
    return f"{asked.question!r} does not take these arguments"
