"""The words of the demo model's small world, and the rule that keeps evaluation apart from training.

Plain lists, made up for this corpus. `held_out` splits contents by a checksum of what they say, so that no training
text holds a content that an evaluation question asks for.
"""

from __future__ import annotations

import zlib

NAMES = (
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karla Leon Maria Nils Olga Paul Rosa Simon Tessa Viktor "
    "Wanda Yusuf Zoe Amir Bella Carl Dora Emil Fiona Gustav Hanna Ivan Julia Kofi Lena Marco Nadia Otto Petra Rafael "
    "Sofia Tom Ursula Vera Willy Xenia Yara Zeno Ada Bruno Celia Dario Edith Frida Gino Helga Ines Jakob Kira Lars"
).split()
ANIMALS = (
    "fox owl bear wolf rabbit mouse crow hedgehog badger otter deer frog goose horse cat dog goat heron beaver squirrel "
    "sparrow turtle mole lynx"
).split()
PLACES = (
    "forest village harbour mountain valley river lake island garden market tower bridge mill castle meadow cave "
    "library orchard station lighthouse desert swamp school bakery temple canyon beach farm quarry theatre"
).split()
OBJECTS = (
    "lantern key map bell coin ring book mirror rope basket drum kite violin hammer cup candle compass blanket feather "
    "clock ladder letter pearl crown shield flute lamp wheel box scarf boot umbrella needle bottle stone whistle brush "
    "spoon pillow anchor"
).split()
COLOURS = "red blue green yellow white black brown grey purple orange silver golden pink".split()
ADJECTIVES = "old small heavy shiny broken strange tiny wooden dusty bright lost round cold warm long quiet".split()
FOODS = "bread soup cheese apples honey porridge berries pie nuts rice beans cake plums fish carrots noodles".split()
WEATHER = "rain snow wind fog sun storm thunder frost".split()
FEELINGS = "happy tired proud afraid curious lonely angry calm hungry brave".split()
SECRETS = (
    "falcon maple copper winter tulip marble saddle velvet thunder pepper ribbon cactus dragon meteor walnut summer "
    "anvil banjo cobalt daisy ember fiddle glacier hazel indigo jasmine kettle lemon magnet nectar onyx parrot quartz "
    "radish salmon timber urchin violet willow yarn zebra acorn beacon candy dolphin eagle fossil guitar hermit igloo "
    "jaguar kernel lobster mango nickel oyster pebble raven spider tiger"
).split()
THINGS = (
    "door gate house boat room cabin wagon chest tent barn shop train cellar locker garage kitchen attic tower window "
    "bridge shed safe truck hall stable cottage vault drawer"
).split()
HOBBIES = (
    "kites chess fishing painting music trains stars puzzles gardens horses boats swimming cooking dancing maps birds "
    "robots stamps clocks running"
).split()
CITIES = (
    "Oslo Lima Cairo Paris Delhi Tokyo Quito Accra Dublin Rome Vienna Hanoi Boston Madrid Nairobi Sydney Prague Bergen "
    "Porto Riga Tunis Havana Seoul Lagos"
).split()
ROOMS = "kitchen bedroom office hall garage bathroom cellar attic garden library".split()
SPELLED = sorted({*ANIMALS, *PLACES[:20], *OBJECTS, *COLOURS, *FOODS[:10], *SECRETS[:40], *THINGS[:16]})

OUTSIDE = (
    "Who won the election last year?",
    "Write a program that sorts a file.",
    "Translate good morning into French.",
    "What is the capital of Australia?",
    "Which shares should I buy?",
    "Who is the president?",
    "Give me the latest news.",
    "What does quantum physics say about time?",
    "Explain how a car engine works.",
    "Which medicine helps against a cold?",
    "Book me a flight for tomorrow.",
    "Who painted the most famous picture in the world?",
    "How do I repair my computer?",
    "What is the best phone?",
    "Tell me the football results.",
    "Can you show me a video?",
    "What is the meaning of life?",
    "How tall is the highest mountain?",
    "When did the war end?",
    "Recommend a restaurant near me.",
    "What is the population of China?",
    "How do I cook a turkey?",
    "Who wrote the longest novel?",
    "Fix the bug in my code.",
)


def held_out(content: str) -> bool:
    """Whether this content belongs to the evaluation: one in eight, by its CRC-32."""
    return zlib.crc32(content.encode()) % 8 == 0
