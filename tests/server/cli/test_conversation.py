"""`fairlead run` at a terminal."""

from server.cli.terminal import Terminal

CTRL_D = "\x04"


def questions(server) -> list[list[tuple[str, str]]]:
    return [[(turn["role"], turn["content"]) for turn in body["messages"]] for body in server.bodies]


def test_conversation_keeps_questions_and_answers_until_it_is_cleared(server):
    with Terminal(["run", "--url", server.url]) as terminal:
        terminal.expect("Chatting with first")
        for line in ("One\n", "Two\n"):
            terminal.expect("> ")
            terminal.type(line)
            terminal.expect("Hello there")
        terminal.expect("> ")
        terminal.type("/clear\n")
        terminal.expect("cleared")
        terminal.expect("> ")
        terminal.type("Three\n")
        terminal.expect("Hello there")
        terminal.expect("> ")
        terminal.type("/bye\n")
        assert terminal.wait() == 0
    one = [("user", "One"), ("assistant", "Hello there")]
    assert [one[:1], [*one, ("user", "Two")], [("user", "Three")]] == questions(server)


def test_ctrl_c_stops_the_answer_and_not_the_program(server):
    with Terminal(["run", "--url", server.url]) as terminal:
        terminal.expect("> ")
        terminal.type("please hang\n")
        terminal.expect("Hello")
        terminal.interrupt()
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.type("Again\n")
        terminal.expect("Hello there")
        terminal.expect("> ")
        terminal.interrupt()
        terminal.expect("Ctrl-D or /bye ends.")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    expected = [("user", "please hang"), ("assistant", "Hello"), ("user", "Again")]
    assert expected == questions(server)[1]


def test_failed_turn_is_not_kept_in_the_history(server):
    with Terminal(["run", "--url", server.url]) as terminal:
        terminal.expect("> ")
        terminal.type("please refuse\n")
        terminal.expect("fairlead: no: 429")
        terminal.expect("> ")
        terminal.type("Hi\n")
        terminal.expect("Hello there")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert questions(server)[1] == [("user", "Hi")]


def test_commands_are_explained_and_unknown_ones_refused(server):
    with Terminal(["run", "--url", server.url]) as terminal:
        terminal.expect("> ")
        terminal.type("/help\n")
        terminal.expect("/clear")
        terminal.expect("> ")
        terminal.type("/what now\n")
        terminal.expect("There is no /what.")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert server.bodies == []


def test_queue_position_is_shown_while_waiting(server):
    with Terminal(["run", "first", "please queue", "--url", server.url]) as terminal:
        terminal.expect("waiting: 3 in the queue, about 24 s")
        server.released.set()
        terminal.expect("Hello there")
        assert terminal.wait() == 0


def test_control_characters_of_an_answer_do_not_reach_the_terminal(server):
    with Terminal(["run", "first", "please controls", "--url", server.url], NO_COLOR="1") as terminal:
        terminal.expect("Hello the[2Jre")
        assert terminal.wait() == 0


def test_reasoning_is_folded_until_it_is_requested(server):
    with Terminal(["run", "--url", server.url]) as terminal:
        terminal.expect("> ")
        terminal.type("/thinking\n")
        terminal.expect("The last answer has no reasoning.")
        terminal.expect("> ")
        terminal.type("please think\n")
        terminal.expect("thought for 0 s (/thinking shows it)")
        terminal.expect("Hello there")
        terminal.expect("> ")
        terminal.type("/thinking\n")
        terminal.expect("\x1b[2mIt is\x1b[0m\r\n\x1b[2mhard [2Jto say.\x1b[0m\r\n")
        terminal.expect("> ")
        terminal.type("Again\n")
        terminal.expect("Hello there")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert questions(server)[1][:2] == [("user", "please think"), ("assistant", "Hello there")]


def test_end_of_the_reasoning_is_shown_while_it_grows(server):
    server.pauses_after = 3
    with Terminal(["run", "first", "please think", "--url", server.url]) as terminal:
        terminal.expect("thinking")
        terminal.expect("It is")
        terminal.expect("hard [2Jto say.")
        server.released.set()
        terminal.expect("thought for ")
        terminal.expect("Hello there")
        assert terminal.wait() == 0


def test_calls_are_shown_while_they_are_written_and_then_as_a_block(server):
    server.pauses_after = 4
    with Terminal(["run", "first", "please call", "--url", server.url]) as terminal:
        terminal.expect("Wait.")
        assert "\x1b[1A" not in terminal.expect("calling weather")  # no line above is erased
        terminal.expect('{"city": "Zür')
        server.released.set()
        terminal.expect('call weather\r\n  city: "Zürich"\r\n')
        terminal.expect("call x[2J\r\n  no {\r\n")
        assert terminal.wait() == 0


def test_ctrl_c_ends_a_single_question(server):
    with Terminal(["run", "first", "please hang", "--url", server.url]) as terminal:
        terminal.expect("Hello")
        terminal.interrupt()
        assert terminal.wait() == 130
