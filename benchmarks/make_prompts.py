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
    "Why is {} important?",
    "Tell me about {}.",
)
SUBJECTS = (
    "photosynthesis", "gravity", "the water cycle", "machine learning", "inflation", "the Roman Empire",
    "blood circulation", "plate tectonics", "supply and demand", "black holes", "the Renaissance",
    "DNA", "solar energy", "the Industrial Revolution", "the human heart", "climate change",
    "electricity", "the French Revolution", "bees", "the internet", "democracy", "volcanoes",
    "the moon", "yoga", "renewable energy", "the stock market", "jazz music", "evolution",
    "public transport", "the Silk Road", "antibiotics", "computer networks", "the printing press",
    "recycling", "coffee", "dreams", "artificial neural networks", "the Great Wall of China", "chess",
    "the immune system", "the solar system", "magnetism", "sound", "light", "friction", "atoms",
    "the periodic table", "chemical reactions", "cell division", "natural selection", "ecosystems",
    "coral reefs", "rainforests", "deserts", "glaciers", "earthquakes", "hurricanes", "the ozone layer",
    "nuclear power", "wind turbines", "batteries", "steam engines", "aeroplanes", "submarines",
    "satellites", "telescopes", "microscopes", "lasers", "radio", "television", "smartphones", "email",
    "encryption", "databases", "operating systems", "programming languages", "cloud computing",
    "video games", "robots", "3D printing", "the nervous system", "digestion", "the lungs", "muscles",
    "bones", "the skin", "sleep", "memory", "emotions", "stress", "nutrition", "vitamins", "allergies",
    "diabetes", "the common cold", "bacteria", "fungi", "butterflies", "ants", "whales", "elephants",
    "penguins", "dinosaurs", "horses", "cats", "sharks", "owls", "ancient Egypt", "ancient Greece",
    "the Middle Ages", "the Vikings", "the Aztecs", "the Ottoman Empire", "the American Civil War",
    "the First World War", "the Cold War", "the Olympic Games", "the United Nations",
    "the European Union", "human rights", "voting", "taxes", "money", "banks", "insurance", "trade",
    "unemployment", "advertising", "small businesses", "architecture", "painting", "sculpture",
    "photography", "opera", "ballet", "poetry", "theatre", "cinema", "classical music", "the piano",
    "mathematics", "geometry", "algebra", "probability", "statistics", "logic", "philosophy",
    "religion", "mythology", "football", "swimming", "meditation", "gardening", "cooking", "cheese",
    "chocolate", "rice", "tea", "olive oil", "salt", "cotton", "paper", "glass", "steel", "concrete",
    "plastic", "gold", "diamonds", "bridges", "tunnels", "canals", "lighthouses", "maps", "calendars",
    "clocks", "the alphabet", "libraries", "museums", "schools", "newspapers",
)  # fmt: skip
CODE = (
    "Write a Python function that {}.",
    "Write a Python function that {}, and explain how it works.",
    "Show me how to write a program that {}.",
    "Write a JavaScript function that {}.",
)
TASKS = (
    "reverses a string", "checks whether a year is a leap year", "finds the largest number in a list",
    "counts the vowels in a word", "sorts a list of numbers", "computes the factorial of a number",
    "merges two sorted lists", "removes duplicates from a list", "converts Celsius to Fahrenheit",
    "reads a file line by line", "checks whether a word is a palindrome", "computes the sum of a list",
    "counts how often each word occurs in a text", "generates the Fibonacci sequence",
    "finds the second largest number in a list", "validates an email address", "flattens a nested list",
    "computes the average of a list of numbers", "rolls two dice",
    "finds the common elements of two lists", "converts a number to binary",
    "checks whether a list is sorted", "prints a multiplication table",
    "finds the longest word in a sentence", "counts the lines of a file", "shuffles a list",
    "splits a list in two", "computes the greatest common divisor of two numbers",
    "capitalises every word", "rotates a list by one place",
    "finds the smallest number that is missing in a list", "computes the area of a circle",
    "downloads a web page", "parses a date", "sorts words by their length", "implements a stack",
    "implements a queue", "searches a sorted list", "transposes a matrix", "computes compound interest",
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
    "skills for a software developer", "ways to save water", "ideas for a science project",
    "musical instruments for beginners", "healthy snacks", "inventions that changed the world",
    "ways to make a room brighter", "qualities of a good leader", "team-building activities",
    "topics for a blog", "ways to help the environment", "sports for the winter",
    "questions for an interview", "ways to improve my writing", "family traditions",
    "dishes with potatoes", "things to do before a long journey", "animals that live in the forest",
    "ways to meet people", "tools for a home workshop", "reasons to exercise", "ways to remember names",
    "board games for adults", "ideas for a surprise party", "mistakes of new drivers",
    "careers in health care", "cities to live in", "famous scientists", "habits for a calm evening",
    "colours for a kitchen", "subjects for a painting",
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
    "to introduce myself to a new team", "to decline an invitation politely",
    "to ask a shop for a refund", "to welcome a new neighbour", "to ask a client for feedback",
    "to announce a change of address", "to ask for a pay rise", "to thank a teacher",
    "to book a table for twelve people", "to report a broken street lamp",
    "to wish a grandmother a happy birthday", "to ask a librarian for help",
    "to offer help with a move",
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
    "a letter that arrives ten years late", "a small village in the mountains", "a fox and a crow",
    "an astronaut who is homesick", "a painter without colours", "a river that runs backwards",
    "a mouse in a library", "a king who cannot sleep", "a forgotten garden", "a train at midnight",
    "a girl and her violin", "a wizard who loses his hat", "an island of birds",
    "a farmer and the rain", "a clever spider", "a boat made of paper", "the first day at school",
    "a shy giant", "an old map", "a bear who wants to dance", "a market in the desert",
    "two rival chefs", "a mirror that tells the truth", "a night in a museum",
    "a bridge between two towns", "a bee who is afraid of flowers", "a stolen bicycle bell",
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
    "running and swimming", "a star and a planet", "an alligator and a crocodile",
    "cash and credit cards", "a simile and a metaphor", "electric cars and petrol cars",
    "saving and investing", "RAM and a hard disk", "mitosis and meiosis", "an atom and a molecule",
    "a lake and a sea", "butter and margarine", "a noun and a verb", "a piano and an organ",
    "a solid and a liquid", "heat and temperature", "a poem and a song", "mass and weight",
    "a democracy and a monarchy", "hardware and software", "a hurricane and a tornado",
    "fruit and vegetables", "a fact and an opinion", "import and export", "a hypothesis and a theory",
    "an artery and a vein", "a class and an object", "a stack and a queue", "jam and jelly",
    "a duck and a goose", "cotton and wool",
)  # fmt: skip
HOW = (
    "How do I {}?",
    "Give me step-by-step instructions to {}.",
    "What should I keep in mind when I {}?",
)
ACTIONS = (
    "cook a vegetable soup", "plan a trip to Japan", "write a good CV", "fix a flat bicycle tyre",
    "start a small garden", "prepare for an exam", "make a cup of green tea",
    "learn to play the guitar", "organise my desk", "train for a ten-kilometre run", "write a speech",
    "choose a laptop", "make new friends in a new city", "sleep better", "clean a wooden floor",
    "paint a room", "take better photographs", "change a light bulb", "read more books", "keep a diary",
    "give a presentation", "learn to swim", "wash a woollen jumper", "grow tomatoes", "write a poem",
    "build a birdhouse", "boil an egg", "pack a suitcase", "make pancakes", "set up a budget",
    "stop procrastinating", "repair a torn shirt", "choose a gift", "draw a portrait",
    "look after a cat", "learn to type fast", "play chess well", "start a blog",
    "prepare for a marathon", "make a paper plane", "sharpen a knife", "iron a shirt", "cook rice",
    "speak in public", "move to another country", "buy a used car", "make lemonade", "clean windows",
    "write a business plan", "meditate", "remember what I read",
)  # fmt: skip
WHY = (
    "{}",
    "{} Explain briefly.",
    "{} Answer in detail.",
)
RIDDLES = (
    "Why do leaves change colour in autumn?", "Why is the sea salty?", "Why do cats purr?",
    "Why do we yawn?", "Why does ice float on water?", "What causes thunder?", "What causes tides?",
    "Why do stars twinkle?", "Why do birds migrate?", "How do fish breathe?", "How do plants drink?",
    "Why do onions make us cry?", "Why do we need iron in our food?",
    "How do bats find their way in the dark?", "What causes wind?", "Why is the Earth round?",
    "How do magnets attract iron?", "Why does metal rust?", "How is glass made?",
    "How is sugar produced?", "How do aeroplanes stay in the air?", "How does a refrigerator work?",
    "How does a camera take a picture?", "What is a fraction?", "What is a square root?",
    "What is a triangle?", "What is an equation?", "What is a metaphor?", "What is a verb?",
    "What is a galaxy?", "What is a comet?", "What is a mammal?", "What is a hormone?",
    "What is a budget?", "What is a contract?", "What is a loan?", "How are mountains formed?",
    "How are rivers formed?", "How are caves formed?", "How are laws made?", "How are diamonds formed?",
    "How are novels published?", "Describe how honey is made.", "Describe how silk is made.",
    "Describe how a letter is delivered.", "Describe how a bill becomes a law.",
    "How does a thermometer work?", "How does a microwave oven heat food?", "How does a lock work?",
    "How does soap clean?", "How does the heart beat?", "How does the eye see?",
    "How does the ear hear?", "Why do people laugh?", "Why do people dance?",
    "Why do people tell stories?", "Why do we celebrate birthdays?", "Why do some people snore?",
    "Why do shoes wear out?", "Why do batteries run out?", "Why do volcanoes erupt?",
    "Why do boats float?", "Explain how a clock keeps time.", "Explain how a kite flies.",
    "Explain how a bridge carries its load.", "Explain how a rocket leaves the ground.",
    "Explain how a seed becomes a plant.", "Explain how a piano makes sound.",
    "Explain how a lever works.", "What causes headaches?", "What causes fog?", "What causes an echo?",
    "What causes inflation to rise?", "What causes hiccups?", "How is music written?",
    "How is cheese made?", "How is steel made?",
)  # fmt: skip
KINDS = (
    (EXPLAIN, SUBJECTS), (CODE, TASKS), (LISTS, THINGS), (LETTERS, PURPOSES), (STORIES, HEROES),
    (REWRITE, SENTENCES), (QUESTIONS, PAIRS), (HOW, ACTIONS), (WHY, RIDDLES),
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
