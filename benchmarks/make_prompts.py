"""Writes the instructions that a chat model's draft is distilled from, and others that it is measured on.

    python benchmarks/make_prompts.py benchmarks/prompts

Two files, one instruction per line: `train.txt` (templates times topics, shuffled) and `held-out.txt`, whose
topics are not in the first file. They depend on nothing but this script.
"""

from __future__ import annotations

import pathlib
import random

from toy import Parser, begin

from cspd_jax._utils.files import write_text

EXPLAIN = (
    "Explain {} in simple terms.",
    "What is {}, and why does it matter?",
    "Give a short introduction to {} for a beginner.",
    "How does {} work?",
    "What are the main advantages and disadvantages of {}?",
    "List five interesting facts about {}.",
    "Write a short paragraph about {}.",
    "What are some common misconceptions about {}?",
    "Describe the history of {} in a few sentences.",
    "How would you explain {} to a ten-year-old child?",
)
SUBJECTS = (
    "photosynthesis", "gravity", "the water cycle", "machine learning", "inflation", "the Roman Empire",
    "vaccination", "plate tectonics", "supply and demand", "black holes", "the Renaissance", "DNA",
    "solar energy", "the Industrial Revolution", "the human heart", "climate change", "electricity",
    "the French Revolution", "bees", "the internet", "democracy", "volcanoes", "the moon", "yoga",
    "renewable energy", "the stock market", "jazz music", "evolution", "public transport", "the Silk Road",
    "antibiotics", "computer networks", "the printing press", "recycling", "coffee", "dreams",
    "artificial neural networks", "the Great Wall of China", "chess", "the immune system",
)  # fmt: skip
CODE = (
    "Write a Python function that {}.",
    "Write a Python function that {}, and explain how it works.",
    "Show me how to write a program that {}.",
    "Write a JavaScript function that {}.",
)
TASKS = (
    "reverses a string", "checks whether a number is prime", "finds the largest number in a list",
    "counts the vowels in a word", "sorts a list of numbers", "computes the factorial of a number",
    "merges two sorted lists", "removes duplicates from a list", "converts Celsius to Fahrenheit",
    "reads a file line by line", "checks whether a word is a palindrome", "computes the sum of a list",
    "counts how often each word occurs in a text", "generates the Fibonacci sequence",
    "finds the second largest number in a list", "validates an email address",
    "flattens a nested list", "computes the average of a list of numbers", "rolls two dice",
    "finds the common elements of two lists",
)  # fmt: skip
LISTS = (
    "List ten {}.",
    "Give me some ideas for {}.",
    "What are the best {}? Explain your choice.",
    "Suggest five {} and describe each in one sentence.",
)
THINGS = (
    "healthy breakfasts", "hobbies for a rainy day", "ways to save money", "books for young readers",
    "places to visit in Europe", "birthday presents for a friend", "games for a children's party",
    "exercises that need no equipment", "ways to reduce stress", "vegetarian dinners",
    "names for a small bakery", "tips for a job interview", "activities for a family weekend",
    "habits of good students", "ways to learn a new language", "plants for a small garden",
    "questions to ask a new colleague", "ways to stay motivated", "films about friendship",
    "skills for a software developer",
)  # fmt: skip
LETTERS = (
    "Write an email {}.",
    "Write a short, polite letter {}.",
    "Write a friendly message {}.",
)
PURPOSES = (
    "to my boss asking for a day off", "to thank a colleague for help with a project",
    "to invite friends to a dinner", "to complain about a late delivery", "to cancel a subscription",
    "to apologise for missing a meeting", "to ask a professor for a letter of recommendation",
    "to congratulate a friend on a new job", "to remind the team of a deadline",
    "to ask a landlord to repair the heating", "to apply for an internship at a museum",
    "to introduce myself to a new team",
)  # fmt: skip
STORIES = (
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write the first paragraph of a novel about {}.",
    "Tell me a bedtime story about {}.",
)
HEROES = (
    "a dragon who is afraid of fire", "a lost robot", "a lighthouse keeper", "two friends in a storm",
    "a girl who finds a secret door", "an old clock", "a cat who can talk", "a journey to the sea",
    "the last tree in a city", "a baker who loses her sense of taste", "a boy and his kite",
    "a ship that never reaches its port", "a snowy night", "a detective who is always wrong",
    "a letter that arrives ten years late", "a small village in the mountains",
)  # fmt: skip
REWRITE = (
    "Rewrite this sentence in a more formal tone: {}",
    "Correct the grammar of this sentence: {}",
    "Summarise this in a few words: {}",
    "Translate this sentence into French: {}",
    "Rewrite this in the past tense: {}",
)
SENTENCES = (
    "I wanna go home because im tired of this meeting.",
    "She don't like the new car, it is to loud.",
    "The results of the experiment was not what we was hoping for, but we learned alot.",
    "Our company makes bikes and we sell them all over the world since many years.",
    "Can you send me that file asap, I need it for the thing tomorrow.",
    "The weather is nice today and the children play in the park near the river.",
    "He says that the project will be finish next week if nobody is sick.",
    "The restaurant was crowded, the food was cold and nobody smiled.",
    "Me and my brother goes to the market every saturday to buy vegetable.",
    "They forgot to lock the door, so the dog ran into the street.",
    "We are happy to tell you that your order is ready for pickup.",
    "Learning to cook takes patience, but it is worth it.",
)  # fmt: skip
QUESTIONS = (
    "What is the difference between {}?",
    "Compare {}.",
    "Which is better for most people: {}? Give reasons.",
)
PAIRS = (
    "a virus and a bacterium", "weather and climate", "a list and a tuple in Python", "tea and coffee",
    "speed and velocity", "a novel and a short story", "renting and buying a home", "a city and a town",
    "running and swimming", "a star and a planet", "an alligator and a crocodile", "cash and credit cards",
    "a simile and a metaphor", "electric cars and petrol cars", "saving and investing", "RAM and a hard disk",
)  # fmt: skip
HOW = (
    "How do I {}?",
    "Give me step-by-step instructions to {}.",
    "What should I keep in mind when I {}?",
)
ACTIONS = (
    "bake a loaf of bread", "plan a trip to Japan", "write a good CV", "fix a flat bicycle tyre",
    "start a small garden", "prepare for an exam", "make a cup of green tea", "learn to play the guitar",
    "organise my desk", "train for a ten-kilometre run", "write a speech", "choose a laptop",
    "make new friends in a new city", "sleep better", "clean a wooden floor", "paint a room",
)  # fmt: skip
KINDS = (
    (EXPLAIN, SUBJECTS), (CODE, TASKS), (LISTS, THINGS), (LETTERS, PURPOSES), (STORIES, HEROES),
    (REWRITE, SENTENCES), (QUESTIONS, PAIRS), (HOW, ACTIONS),
)  # fmt: skip
HELD_OUT = (
    "Explain how a rainbow is formed.",
    "What is a black market, and how does it arise?",
    "Write a Python function that checks whether two words are anagrams.",
    "Write a Python function that returns the n-th triangular number, and explain how it works.",
    "List ten things to pack for a week at the beach.",
    "Give me some ideas for a school science fair.",
    "Write an email to a hotel asking whether they have parking.",
    "Write a short, polite letter to a neighbour about loud music.",
    "Write a short story about a clockmaker who can stop time.",
    "Write a poem about the first day of autumn.",
    "Correct the grammar of this sentence: The teachers was angry because nobody have done they homework.",
    "Summarise this in a few words: The train was late, the heating broken, and yet everybody laughed.",
    "What is the difference between a frog and a toad?",
    "Compare working at home and working in an office.",
    "How do I remove a coffee stain from a shirt?",
    "Give me step-by-step instructions to make a paper boat.",
)


def train() -> list[str]:
    """Every template with every topic, shuffled."""
    lines = [
        template.format(topic) for templates, topics in KINDS for template in templates for topic in topics
    ]
    random.Random(0).shuffle(lines)
    return lines


def make_parser() -> Parser:
    parser = Parser(__doc__, folder=pathlib.Path("prompts"))
    parser.add_argument("folder", type=pathlib.Path)
    return parser


def main() -> None:
    args = begin(make_parser())
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train.txt", train()), ("held-out.txt", HELD_OUT)):
        write_text(args.folder / name, "\n".join(lines) + "\n")
        print(f"{args.folder / name}: {len(lines)} instructions")


if __name__ == "__main__":
    main()
