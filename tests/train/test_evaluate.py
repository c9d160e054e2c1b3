"""Samples of a trained model go on with a prompt."""
# limit: 180
import os
import struct
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness
import reference

MESHES = (1, {}), (2, dict(tp=2)), (2, dict(dp=2, micro_batch=4)), (2, dict(tp=2, strategy="up"))


def logits(shape, model, tokens):
    """Of what follows each of the tokens."""
    inputs = np.array([tokens])
    probabilities = reference.forward(shape, model, inputs, inputs)[1][-1]
    return np.log(probabilities[0])


class Prompt(harness.Case):
    prompt = "HELLO, YOU ?"

    def sample(self, ranks=1, **more):
        log, result = self.train(ranks, **{**dict(train=None, steps=0, sample_tokens=12, prompt=self.prompt), **more})
        (event,) = harness.events(log, "sample")
        self.assertTrue(event["text"] in result.out, str(result))
        return event["text"]

    def vocabulary(self, words, end_of_text):
        """Beside a copy of the model, whose name is returned."""
        folder = self.fresh("model")
        os.mkdir(folder)
        reference.write_model(os.path.join(folder, "model.bin"), self.shape, self.parameters)
        with open(os.path.join(folder, "tokenizer.bin"), "wb") as file:
            file.write(struct.pack("<256I", 20240328, 2, len(words), end_of_text, *[0] * 252))
            file.write(b"".join(bytes([len(word)]) + word for word in words))
        return os.path.join(folder, "model.bin")

    def test_the_most_likely_tokens_are_numpys(self):
        tokens = list(self.prompt.encode())
        for _ in range(12):
            tokens.append(int(logits(self.shape, self.parameters, tokens)[-1].argmax()))
        words = [b"<%d>" % token if token < 20 else bytes([token]) for token in range(self.shape.V)]
        expected = b"".join(words[token] for token in tokens).decode()
        model = self.vocabulary(words[:256] + [bytes([b]) for b in range(256) if bytes([b]) not in words], 19)
        for ranks, mesh in MESHES:
            with self.subTest(**mesh):
                self.assertEqual(self.sample(ranks, init_from=model, temperature=0, **mesh), expected)
        self.assertEqual(self.sample(init_from=model, top_k=1), expected)
        path = self.fresh("prompt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.prompt)
        self.assertEqual(self.sample(init_from=model, temperature=0, prompt="@" + path), expected)

    def test_top_k_and_temperature(self):
        words = [b"<%d>" % token for token in range(32)] + [bytes([token]) for token in range(32, self.shape.V)]
        model = self.vocabulary(words + [bytes([b]) for b in range(256) if bytes([b]) not in words], 31)
        number = {word.decode(): token for token, word in enumerate(words)}

        def ranks_of(**more):
            """Of each token drawn, how many were more likely."""
            text, tokens = self.sample(init_from=model, sample_tokens=24, **more), []
            while text:
                word = text[:text.index(">") + 1] if text[0] == "<" and text[1:2].isdigit() else text[0]
                tokens.append(number[word])
                text = text[len(word):]
            self.assertEqual(len(tokens), len(self.prompt) + 24)
            found = logits(self.shape, self.parameters, tokens)
            first = len(self.prompt)
            return [int((found[i - 1] > found[i - 1][tokens[i]]).sum()) for i in range(first, len(tokens))]
        drawn = ranks_of(top_k=3)
        self.assertTrue(max(drawn) <= 2 and max(drawn) > 0, drawn)
        self.assertGreater(max(ranks_of()), 2)
        self.assertEqual(max(ranks_of(temperature=1e-4)), 0)
        self.assertGreater(sum(ranks_of(temperature=10)), sum(ranks_of(temperature=0.3)))
        self.assertEqual(self.sample(init_from=model), self.sample(init_from=model, seed=1337))
        self.assertNotEqual(self.sample(init_from=model), self.sample(init_from=model, seed=1338))

    def test_what_is_no_prompt(self):
        def refused(*words, **more):
            values = dict(train=None, steps=0, init_from=self.model)
            self.assertFails(harness.run(self.arguments(**{**values, **more})), "--prompt", *words)
        model = self.vocabulary([bytes([b]) for b in range(256)] + [b"<end>"], 256)
        refused("37 tokens", "--seq 36", prompt="A" * 37)
        refused("token 1 is 121", "101 words", prompt="By")
        refused("UTF-8", "byte 2", init_from=model, prompt="ab\udcff")
        refused("cannot be opened", "No such file", prompt="@/nowhere")
        refused("is not a regular file", prompt="@/")
        refused("no word for the byte 65", init_from=self.vocabulary([b"<end>", b"B"], 0), prompt="BA")
        refused("tokenizer.bin", init_from=None, layers=1, channels=48, heads=3, vocab=300, prompt="a")
        path = self.fresh("long")
        with open(path, "w", encoding="utf-8") as file:
            file.write("a" * 70_000)
        refused("65536", prompt="@" + path)

    def test_ranks_with_other_prompts(self):
        folder = self.fresh("ranks")
        for rank, text in enumerate("AB"):
            os.makedirs(f"{folder}/{rank}")
            with open(f"{folder}/{rank}/prompt", "w", encoding="utf-8") as file:
                file.write(text)
        result = harness.run(self.arguments(train=None, steps=0, tp=2, prompt="@prompt"), 2, wrapper=(
            "sh", "-c", f'cd {folder}/"{harness.launcher.RANK}" && exec "$0" "$@"'))
        self.assertFails(result, "rank 1", "--prompt", "same file")


if __name__ == "__main__":
    unittest.main()
