"""Mathematical answers, right and wrong, judged by hand; every reference answer of MATH-500 and AIME."""

import asyncio
import json

import pytest

from poise.envs.grading import number_in
from poise.envs.math_grading import MathAnswer, find_answer, grade_math

FOUND = [
    ("so \\boxed{42}", "42", True),
    ("\\boxed{1} or rather \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", True),
    ("<answer>\n\\boxed{'x'}\n</answer>", "'x'", True),
    ("\\boxed{\\text{(C)}} and 7", "\\text{(C)}", True),
    ("\\boxed{1, 2, 3}", "1, 2, 3", True),
    ("\\boxed{12", "12", True),  # cut before its brace
    ("Thus.\nAnswer: 34", "34", False),
    ("Answer: 1\nAnswer: $2$.", "2", False),
    ("**Final Answer:** $x^2$", "x^2", False),
    ("The answer is 5.", "5", False),
    ("first\n\\(3\\)\n", "3", False),
    ("\\boxed {7}", "7", True),
    ("so $\\boxed 7$", "7", True),
    ("\\boxed{7.}", "7", True),
    ("\\boxed{\\boxed{7}}", "7", True),
    ("\\boxed{7}, as \\boxed asks for", "7", True),
    ("Answer:\n7", "7", False),
    ("Answer:\n7\nThis is 3 + 4.", "7", False),
    ("**Answer:**\n$$\n7\n$$", "7", False),
    ("### Answer\n\n7", "7", False),
    ("Therefore, the answer is $7$.", "7", False),
    ("Answer 7", "7", False),
    ("Answers vary, answer by answer.\n7", "7", False),
    ("Answering is easy.\n\\[\n7\n\\]", "7", False),
    ("so\n$$\n7\n$$", "7", False),
    ("```\n7\n```", "7", False),
    ("<answer>7</answer>", "7", False),
    ("# `7`", "7", False),
    ("*7*", "7", False),
    ("The answer is:", "", False),
    ("```\n```", "", False),
    ("7", "7", False),
    ("", "", False),
    ("\n \n", "", False),
]
RIGHT = [
    ("1/2", "\\frac{1}{2}"),
    ("0.5", "\\frac12"),
    ("x=5", "5"),
    ("\\left(3,\\frac{\\pi}{2}\\right)", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("(x+1)^2", "x^2+2x+1"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("10\\%", "10"),
    ("1,234", "1234"),
    ("\\text{Evelyn}", "\\text{Evelyn}"),
    ("[2,5)", "[2, 5)"),
    ("1,-2", "-2, 1"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("1 \\text{ m}", "1"),
    ("6^{2}-1", "35"),
    ("42=42", "42"),
    ("6 \\cdot 7 = 42", "42"),
    ("x_1 = 42", "42"),
    ("2516_{8}", "2516_8"),
    ("2516", "2516_8"),  # the question asks for the base
    ("0 + 1 + \\dots + n", "0+1+\\dots+n"),
    ("12\\ 000", "12000"),
    ("12\\,000", "12000"),
    ("12\u202f000", "12000"),
    ("\u20115", "-5"),
    ("4.2e1", "42"),
    ("1e-3", "0.001"),
    ("-0", "0"),
    ("x \\, y", "xy"),
]
WRONG = [  # thirty, each close to its reference
    ("43", "42"),
    ("-42", "42"),
    ("4.2", "42"),
    ("420", "42"),
    ("41.9999", "42"),
    ("42, 43", "42"),
    ("\\{41, 42, 43\\}", "42"),
    ("42 \\text{ or } 43", "42"),
    ("\\pm 42", "42"),
    ("41 < x < 43", "42"),
    ("x \\in \\{41, 42\\}", "42"),
    ("42x", "42"),
    ("\\frac{2}{1}", "\\frac{1}{2}"),
    ("0.51", "\\frac{1}{2}"),
    ("\\frac{1}{-2}", "\\frac{1}{2}"),
    ("0.333", "\\frac{1}{3}"),
    ("3.1416", "\\pi"),
    ("\\frac{22}{7}", "\\pi"),
    ("1.414", "\\sqrt{2}"),
    ("\\left(3, \\frac{\\pi}{3}\\right)", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("\\left(\\frac{\\pi}{2}, 3\\right)", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("(x-1)^2", "x^2+2x+1"),
    ("x^2+2x", "x^2+2x+1"),
    ("[2, 5]", "[2, 5)"),
    ("(2, 5)", "[2, 5)"),
    ("1, 2", "-2, 1"),
    ("1", "-2, 1"),
    ("\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("\\text{Evelin}", "\\text{Evelyn}"),
    ("\\text{(D)}", "\\text{(C)}"),
]
FALSE = [  # ways to name the right answer among others, or to say something else
    ("41 = 42", "42"),
    ("0 = 1 = 2 = 42", "42"),
    ("43 \\equiv 42", "42"),
    ("0 \\ldots 42", "42"),
    ("0, 1, \\dots, 42", "42"),
    ("42...", "42"),
    ("42} 43", "42"),
    ("42 } > { 43", "42"),
    ("42} or {43", "42"),
    ("4 2", "42"),
    ("4 \\quad 2", "42"),
    ("4\\ 2", "42"),
    ("4~2", "42"),
    ("4\n2", "42"),
    ("2516_7", "2516_8"),
    ("\u201142", "42"),
    ("42e1", "42"),
    ("42²", "42"),
    ("not 42", "42"),
    ("\\ne 42", "42"),
    ("\\text{not } 42", "42"),
    ("\\ge 42", "42"),
    ("A, B, C, D", "A"),
    ("ABCD", "A"),
    ("42!", "42"),
    ("\\overline{42}", "42"),
]
NOTHING = ["", " ", "\\frac{0}{0}", "\\infty", "x", "\\text{the answer}", "\\boxed{}", "42" * 600]
ENDLESS = ["\\sqrt{2}^{10^{10^{10}}}"]


def grades(pairs):
    async def judge():
        return [await grade_math(answer, reference) for answer, reference in pairs]

    return asyncio.run(judge())


@pytest.mark.parametrize(("text", "answer", "is_boxed"), FOUND)
def test_where_the_answer_stands(text, answer, is_boxed):
    assert find_answer(text) == MathAnswer(text=answer, is_boxed=is_boxed)


@pytest.mark.parametrize(
    "text",
    ["\n" * 300_000, " " * 300_000, "answer" * 100_000, "answer " * 100_000, "* _" * 200_000, "**a " * 200_000,
     "answer" + " " * 300_000 + "x", "the" + " " * 300_000 + "x", "#-" * 200_000, "`" * 300_000 + "\n",
     "\\boxed" * 50_000, "\\boxed" + " " * 300_000, "9²" * 100_000, "1 0" * 100_000, "minus " * 100_000,
     "\\boxed{" * 50_000, "$" * 300_000, "$" * 300_000 + "a", "\\text{" * 50_000, "1 " * 200_000,
     "answer" + " _*" * 200_000],
)  # fmt: skip
def test_long_texts_take_no_longer_than_they_are_long(text):
    # Minutes where a search were quadratic; the answers do not matter.
    find_answer(text)
    number_in(text)


def test_right_and_wrong():
    assert len(WRONG) == 30
    assert [pair for pair, grade in zip(RIGHT, grades(RIGHT), strict=True) if not grade.is_right] == []
    assert [pair for pair, grade in zip(WRONG, grades(WRONG), strict=True) if grade.is_right] == []
    assert [pair for pair, grade in zip(FALSE, grades(FALSE), strict=True) if grade.is_right] == []
    assert not any(grade.is_right for grade in grades((answer, "42") for answer in NOTHING))


def test_an_endless_expression_is_wrong_and_leaves_the_grader_in_order():
    found = grades([*((answer, "42") for answer in ENDLESS), ("42", "42.0")])
    assert [grade.is_right for grade in found] == [*[False] * len(ENDLESS), True]
    assert [grade.timed_out for grade in found] == [True, False]


def test_every_reference_answer_of_math_500(math_folder):
    rows = [json.loads(line) for line in (math_folder / "math500.jsonl").read_text().splitlines()]
    assert len(rows) == 500
    # The reference, the box at the end of the reference solution, and the reference in other clothes.
    boxed = [find_answer(row["solution"]).text for row in rows]
    pairs = [(row["answer"], row["answer"]) for row in rows]
    pairs += [(solved, row["answer"]) for solved, row in zip(boxed, rows, strict=True)]
    pairs += [(f" {row['answer']} ".replace("\\frac", "\\dfrac"), row["answer"]) for row in rows]
    assert [pair for pair, grade in zip(pairs, grades(pairs), strict=True) if not grade.is_right] == []


def test_the_references_of_aime_do_not_fit_each_other(math_folder):
    rows = json.loads((math_folder / "aime_1983_2023.json").read_text())
    answers = [row["answer"] for row in rows]
    assert all(grade.is_right for grade in grades((f"{int(a):03d}", a) for a in answers if a.isdecimal()))
    shifted = [(str(int(a) + 1), a) for a in answers if a.isdecimal()]
    assert len(shifted) > 900
    assert not any(grade.is_right for grade in grades(shifted))
