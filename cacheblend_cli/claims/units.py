"""Units of numbers: names of one unit, powers of ten, and what looks like a unit."""

from __future__ import annotations

import re

OTHER, ANY = "?", "*"
"""Unit of a number before an ordinary word, and the key of a number with any unit."""
UNITS = {
    form: unit
    for unit, forms in {
        "%": "% percent prozent pourcent",
        "eur": "€ eur euro euros", "usd": "$ usd dollar dollars", "chf": "chf franken", "yen": "¥ yen jpy", "nok": "nok kr kroner",
        "gbp": "£ gbp pound pounds lb lbs",  # a pound is of money or of weight
        "inr": "₹ inr rupee rupees", "rub": "₽ rubles roubles", "krw": "₩ krw",
        "s": "s sec secs second seconds sekunde sekunden seconde secondes", "min": "min mins minute minutes minuten",
        "h": "h hr hrs hour hours stunde stunden heure heures", "day": "day days tag tage tagen jour jours",
        "week": "week weeks wk wks woche wochen semaine semaines", "month": "month months mth mths monat monate monaten mois",
        "year": "year years yr yrs jahr jahre jahren an ans année années", "ms": "ms millisecond milliseconds",
        "km": "km kmh kph kilometer kilometers kilometre kilometres", "m": "m meter meters metre metres mètre mètres",
        "cm": "cm centimeter centimeters centimetre centimetres", "mm": "mm millimeter millimeters millimetre millimetres",
        "mi": "mi mile miles mph", "ft": "ft foot feet", "inch": "inch inches", "yd": "yd yds yard yards", "oz": "oz ounce ounces",
        "ha": "ha hectare hectares hektar", "acre": "acre acres", "gal": "gal gallon gallons",
        "kg": "kg kilo kilos kilogram kilograms kilogramm", "g": "g gram grams gramm", "t": "t ton tons tonne tonnes",
        "l": "l liter liters litre litres", "kb": "kb kib", "mb": "mb mib", "gb": "gb gib", "tb": "tb tib", "w": "w watt watts", "kw": "kw",
        "kwh": "kwh", "v": "v volt volts", "c": "°c ℃", "f": "°f ℉",
    }.items()
    for form in forms.split()
} | {"per cent": "%", "pour cent": "%", "kilowatt hours": "kwh", "kilowatt hour": "kwh"}  # fmt: skip
SYMBOLS = "%‰€$£¥₹₽₩₺₫₪₴₦฿₱℃℉"
TEMPERATURES = frozenset("cf")
POWERS = {
    "hundred": 2, "thousand": 3, "k": 3, "tausend": 3, "mille": 3, "million": 6, "millions": 6, "mio": 6, "millionen": 6, "m": 6,
    "billion": 9, "billions": 9, "bn": 9, "milliarde": 9, "milliarden": 9, "milliard": 9, "milliards": 9, "mrd": 9, "万": 4, "亿": 8,
}  # fmt: skip
_NAMES = frozenset(UNITS.values())
_NO_UNITS = frozenset(
    "a an per each every to and or of in on at by for from is was are were the than with bis und oder pro je von im am der die das "
    "à et ou de par en au le la les est sont a y o e en por de vs bzw th st nd rd nr ff pp".split()
)  # words after a number that are no unit, but may be before one
_PREFIXED = re.compile(
    "(kilo|milli|mega|giga|tera|micro|mikro|nano|centi|deci|hecto)"
    "(gram|lit(?:er|re)|met(?:er|re)|watt|volt|amp|byte|bit|hertz|pascal|joule|calorie)(?:m?e?s?|n|eres?)"
)
_PREFIXES = {"micro": "μ", "mikro": "μ"}
_BASES = {"hertz": "hz", "pascal": "pa", "bit": "bit", "calorie": "cal"}
_ABBREVIATION = re.compile(rf"[b-df-hj-np-tv-xzμω]{{2,5}}|[\u0431-дж-зк-нп-тф-щ]{{2,5}}|[{SYMBOLS}]")  # no vowels
_PLURAL = re.compile("(?<=[a-z][a-oq-z])s$")  # not of rates (Mbps)
_WITH_VOWELS = frozenset(
    "n j bar mbar psi pa hpa kpa mpa gpa ma ah mah va kva mol mmol cal kcal ev kev mev gev ohm dpi ppi iu lux rad kbit mbit gbit "
    "aud aed isk".split()
)


def unit_of(text: str) -> str:
    """Return the unit of a folded word or symbol, in one form if it is known and as written if it looks like one, with
    its divisor (mg/kg). "" for an ordinary word."""
    name, slash, divisor = text.partition("/")
    if name in UNITS:
        unit = UNITS[name]
    elif found := _PREFIXED.fullmatch(name):
        unit = _PREFIXES.get(found[1], found[1][0]) + _BASES.get(found[2], found[2][0])
    elif name not in _NO_UNITS and (_ABBREVIATION.fullmatch(name) or name in _WITH_VOWELS):
        unit = _PLURAL.sub("", name)
    else:
        return ""
    return f"{unit}/{UNITS.get(divisor, divisor)}" if slash else unit


def is_known(unit: str) -> bool:
    return unit.partition("/")[0] in _NAMES


def unit_behind(after: str, more: str) -> str:
    """Return the unit of a number from the two words behind it: "" if there is none, OTHER if the first is an ordinary
    word."""
    if after not in POWERS and (unit := UNITS.get(f"{after} {more}") or unit_of(after)):
        return unit
    if not after or after in _NO_UNITS:
        return ""
    return UNITS.get(more, "" if after in POWERS else OTHER)


def keys_of(unit: str) -> tuple[str, ...]:
    """Return the keys of a text's number with this unit: each unit for which it is found."""
    name, slash, _ = unit.partition("/")
    return (ANY, unit, name + "/") if slash else (ANY, unit, unit + "/")


def keys_for(unit: str) -> tuple[str, ...]:
    """Return the keys under which a number of an answer is looked up. Without a unit or before an ordinary word it is
    found with any, else with the same or none; km/h and km are the same, km/h and km/s are not. What only looks like a
    unit may be the name of a thing, so it is found before an ordinary word, too."""
    if unit in ("", OTHER):
        return (ANY,)
    name, slash, _ = unit.partition("/")
    return ("", *((unit, name) if slash else (unit + "/",)), *(() if is_known(unit) else (OTHER,)))
