"""Right and wrong answers, judged by hand; hostile expressions; every reference answer of GSM8K."""

import asyncio
import json
from fractions import Fraction

import pytest

from poise.envs.grading import is_right, number_in

RIGHT = [
    # plain numbers and what stands around them
    ("72", 72),
    (" 72\n", 72),
    ("72.", 72),
    ("72.0", 72),
    ("+72", 72),
    ("-5", -5),
    ("−5", -5),  # the typographic minus
    ("1,080", 1080),
    ("109,200,000", 109_200_000),
    ("1{,}000", 1000),
    ("$18", 18),
    ("\\$18.00", 18),
    ("€1.234", Fraction("1.234")),
    ("25%", 25),
    ("25\\%", 25),
    ("72 clips", 72),
    ("72 km/h", 72),
    ("5 m^2", 5),
    ("100°", 100),
    (".5", Fraction(1, 2)),
    ("0.1 + 0.2 = 0.30000000000000004", Fraction(3, 10)),  # what a tool showed
    # sentences
    ("The answer is 72.", 72),
    ("The answer is **72**.", 72),
    ("**Answer:** $\\boxed{72}$", 72),
    ("Natalia sold 48 + 24 = 72 clips.", 72),
    ("x = 7", 7),
    ("She pays $5-3 = 2 dollars", 2),
    ("It took 3 of them 12 days", 12),
    ("so about 5-3 apples", 3),  # a minus after a digit is no sign
    ("text #### 72", 72),
    ("#### 1 #### 2", 2),
    ("\\boxed{7} or rather \\boxed{8}", 8),
    ("72 \\boxed{73}", 73),
    ("\\boxed{72\\text{ clips}}", 72),
    ("\\boxed{\\text{Total: }72}", 72),
    ("\\[ \\boxed{\\frac{3}{4}} \\]", Fraction(3, 4)),
    ("\\(72\\)", 72),
    # as Markdown, typesetters and tools write them
    ("*72*", 72),
    ("__72__", 72),
    ("That makes _72_.", 72),
    ("`72`", 72),
    ("```\n72\n```", 72),
    ("US$72", 72),
    ("A\\$72.00", 72),
    ("72\u202fkm", 72),
    ("1\u202f080", 1080),
    ("1\u00a0080\u202f000", 1_080_000),
    ("1_080", 1080),
    ("1'080", 1080),
    ("\u20115", -5),
    ("\u20135", -5),
    ("Total \u2013 72", 72),
    ("Total\u201472", 72),
    ("minus 5", -5),
    ("Negative $5", -5),
    ("77 minus 5", 72),
    ("7.2e1", 72),
    ("1e+16", 10**16),
    ("2.5E-1", Fraction(1, 4)),
    ("72 m²", 72),
    ("72 ft^{2}", 72),
    ("6²", 36),
    ("2¹²", 4096),
    ("x_{1} = 72", 72),
    ("No. 72", 72),
    ("Not 71 but 72", 72),
    ("Why not? 72", 72),
    ("That is not a joke: 72", 72),
    ("\\boxed {72}", 72),
    ("$\\boxed 72$.", 72),
    ("\\boxed{\\boxed{72}}", 72),
    ("\\boxed{72} is what \\boxed asks for in 1 line", 72),
    # fractions
    ("1/2", Fraction(1, 2)),
    ("-1/2", Fraction(-1, 2)),
    ("144 / 2", 72),
    ("3 1/2 cups", Fraction(7, 2)),
    ("\\frac{1}{2}", Fraction(1, 2)),
    ("\\dfrac{1}{3}", Fraction(1, 3)),
    ("-\\frac{1}{2}", Fraction(-1, 2)),
    ("3\\frac{1}{2}", Fraction(7, 2)),
]
WRONG = [
    ("", 0),
    ("none", 0),
    ("71", 72),
    ("73", 72),
    ("-72", 72),
    ("72.01", 72),
    ("71.999999", 72),
    ("7 2", 72),
    ("720", 72),
    ("0.72", 72),
    ("1,080", 1),
    ("1.080", 1080),
    ("72 or 73", 72),
    ("72, no, 73", 72),
    ("\\boxed{73} 72", 72),
    ("\\boxed{}", 0),
    ("1/0", 0),
    ("1/2", 2),
    ("0.25", 25),
    ("1000000001", 1_000_000_000),
    ("9" * 100_000, 9),
    ("٧٢", 72),  # other digits than 0-9
    ("a72", 72),
    ("2^72", 72),
    ("2^{72}", 72),
    ("The answer is not 72.", 72),
    ("It isn't $72", 72),
    ("\\boxed{\\text{not } 72}", 72),
    ("x \\neq 72", 72),
    ("x != 72", 72),
    ("x ≠ 72", 72),
    ("72²", 72),
    ("72e3", 72),
    ("x_72", 72),
    ("x_{72}", 72),
    ("10:72", 72),
    ("3:72", 72),
    ("minus 72", 72),
    ("negative $72", 72),
    ("\u201072", 72),  # hyphens that look like a minus
    ("\u201172", 72),
    ("\u201372", 72),
    ("1\u202f072", 72),
    ("72_000", 72),
    ("71–72", 72),
    ("7\u200b2", 72),
    ("\\boxed{72} \\boxed{}", 72),
    ("\\boxed{72} \\boxed 71", 72),
]
EXPRESSIONS = [
    ("3 \\times 24", 72, True),
    ("48+24", 72, True),
    ("2^3 \\cdot 9", 72, True),
    ("2**3", 8, True),
    ("\\sqrt{81}", 9, True),
    ("(4+5)*8", 72, True),
    ("$\\boxed{2 \\cdot 36}$", 72, True),
    ("\\frac{144}{2} + 0", 72, True),
    ("3 × 24", 72, True),
    ("48+25", 72, False),
    ("\\sqrt{-1}", 1, False),
    ("((((", 0, False),
    ("3 + + / 4", 7, False),
    ("1 + " * 100 + "1", 101, False),  # too long to be an answer
]


@pytest.mark.parametrize(("text", "number"), RIGHT)
def test_right(text, number):
    assert asyncio.run(is_right(text, Fraction(number)))


@pytest.mark.parametrize(("text", "number"), WRONG)
def test_wrong(text, number):
    assert not asyncio.run(is_right(text, Fraction(number)))


def test_expressions():
    async def judge():
        return [await is_right(text, Fraction(number)) for text, number, _ in EXPRESSIONS]

    assert asyncio.run(judge()) == [expected for _, _, expected in EXPRESSIONS]


@pytest.mark.parametrize(
    "text", ["9^9^9^9", "9**9**9**9", "\\boxed{(((9^{9})^{9})^{9})^{9}}", "\\sqrt{2}^{10^{10^{10}}}"]
)
def test_an_endless_expression_is_wrong(text):
    assert not asyncio.run(is_right(text, Fraction(9)))


def test_every_reference_answer_of_gsm8k(gsm8k_folder):
    answers = [
        json.loads(line)["answer"]
        for name in ("train.jsonl", "test.jsonl")
        for line in (gsm8k_folder / name).read_text().splitlines()
    ]
    assert len(answers) == 8792

    async def judge():
        for answer in answers:
            stated = answer.split("#### ")[1]
            number = Fraction(stated.replace(",", ""))  # read independently of the code under test
            assert number_in(answer) == number
            for right in (answer, stated, f"{float(number)}", f"$\\boxed{{{stated}}}$", f"The answer is **{stated}**."):
                assert await is_right(right, number), right
            for wrong in (number + 1, number - 1, number + Fraction(1, 100), -number or 1, number * 10 or 1):
                assert not await is_right(str(float(wrong)), number), (wrong, number)

    asyncio.run(judge())
