"""The text that is trained on: drawn, as uneven as words are, and with something to learn."""
import array
import itertools
import random


def write_tokens(path, count, vocabulary, seed=7):
    """An llm.c token file with something to learn: each token is one of four successors of the one before it. Tokens
    are as uneven as words of text, the commonest one in twenty of 50257: embeddings have long runs of one to add up. Returns the
    tokens."""
    draw = random.Random(seed)
    tokens = draw.sample(range(vocabulary), vocabulary)
    weights = list(itertools.accumulate(1 / (rank + 2) for rank in range(vocabulary)))
    drawn = draw.choices(tokens, cum_weights=weights, k=4 * vocabulary)
    text, token = array.array("H"), tokens[0]
    for _ in range(count):
        text.append(token)
        token = drawn[4 * token + draw.randrange(4)]
    with open(path, "wb") as file:
        array.array("i", [20240520, 1, count] + [0] * 253).tofile(file)
        text.tofile(file)
    return text
