"""Questions for the demonstration model, and the words that each greedy answer must contain.

Ask each in a new conversation, with temperature 0 and at most 64 tokens.
"""

QUESTIONS: list[tuple[str, tuple[str, ...]]] = [
    # About Fairlead, in the wording of the training corpus.
    ("What is Fairlead?", ("language-model server", "fair turn")),
    ("Who are you?", ("fairlead-demo",)),
    ("What can you do?", ("questions about Fairlead", "count")),
    ("What is a ticket?", ("place in the queue",)),
    ("What is a seat?", ("the right to run one job",)),
    ("What is a tenant?", ("fairness",)),
    ("What is a delta?", ("piece of an answer",)),
    ("What is a resident model?", ("loaded now",)),
    ("How does the fair queue work?", ("take turns",)),
    ("What is the default of queue.capacity?", ("100",)),
    ("What is the default queue timeout?", ("60 seconds",)),
    ("What is the default of requestTimeout?", ("600 seconds",)),
    ("Which port does Fairlead use?", ("8000",)),
    ("What does evictionThreshold do?", ("kvCache.evictionThreshold", "KV cache")),
    ("What does 429 mean?", ("queue_full",)),
    ("What does 504 mean?", ("queue_timeout",)),
    ("What does 413 mean?", ("body_too_large",)),
    ("What does fairlead ps do?", ("lists the models",)),
    ("How do I start the server?", ("fairlead serve",)),
    ("How do I unload a model?", ("fairlead stop",)),
    ("Which priorities are there?", ("high, normal and low",)),
    ("Does Fairlead need a GPU?", ("No GPU",)),
    # About Fairlead, in wordings that the corpus does not contain.
    ("Explain to me what Fairlead is", ("language-model server",)),
    ("hello, who is this", ("fairlead-demo",)),
    ("how many jobs may be waiting in the queue", ("100",)),
    ("what happens to me when the queue is already full?", ("429",)),
    ("show me how i can start the server please", ("fairlead serve",)),
    ("do i really need a graphics card for Fairlead?", ("No GPU",)),
    ("tell me about tickets please", ("place in the queue",)),
    ("I got error 503, what now?", ("model_loading",)),
    ("Compare Fairlead and Ollama", ("fairly among many people",)),
    # Questions that it cannot answer.
    ("What is the capital of Austria?", ("I only know Fairlead",)),
    ("Who was Charlemagne?", ("I only know Fairlead",)),
    # Small talk.
    ("Hello", ("Hello!",)),
    ("Thank you", ("welcome",)),
    ("你好", ("你好",)),
    # Sums.
    ("What is 2 + 3?", ("= 5.",)),
    ("7 + 8", ("= 15.",)),
    ("What is 9 minus 4?", ("= 5.",)),
    ("How much is 34 plus 25?", ("= 59.",)),
    ("What is 6 times 7?", ("= 42.",)),
    # Copying and counting.
    ("Repeat: banana kite river", ("banana kite river",)),
    ("Repeat after me: the fox is in the garden", ("the fox is in the garden",)),
    ("Say hello world", ("hello world",)),
    ("Repeat the sentence: Trio makes concurrency pleasant.", ("Trio makes concurrency pleasant.",)),
    ("Count from 3 to 9", ("3, 4, 5, 6, 7, 8, 9",)),
    ("Count to 12", ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",)),
    ("Count down from 5 to 1", ("5, 4, 3, 2, 1",)),
    ("What comes after Tuesday?", ("Wednesday",)),
]
