"""Plain requests to which verifiable instructions are added, for those who bring no seed prompts of their own."""

_FORMS = (
    "a short story", "a letter to a friend", "a product review", "a blog post", "a poem", "a summary for a child",
    "an advertisement", "a list of questions", "a dialogue between two neighbours", "a speech of one minute",
    "a diary entry", "a how-to guide",
)  # fmt: skip
_TOPICS = (
    "a lost umbrella", "the first day at a new job", "growing tomatoes", "a night train", "an old lighthouse",
    "learning to swim", "a broken bicycle", "the history of paper", "a mountain village in winter", "baking bread",
    "a robot that paints", "the sounds of a harbour", "how bees find flowers", "a chess match", "moving house",
    "a library at midnight", "the taste of coffee", "a river after rain", "repairing a radio", "a long walk",
    "stars seen from a roof", "a market in the morning", "the invention of zippers", "a dog that waits",
    "a school play", "volcanoes", "a forgotten recipe", "the rules of a card game", "a storm at sea", "saving water",
    "a street musician", "the colour blue", "an apple tree", "a trip by bus", "the weather on other planets",
    "a museum of clocks", "writing by hand", "a garden on a balcony", "the last ferry", "a borrowed book",
)  # fmt: skip

# The forms change fastest, so a split of the list at any place keeps whole topics apart.
SEED_PROMPTS = tuple(f"Write {form} about {topic}." for topic in _TOPICS for form in _FORMS)
