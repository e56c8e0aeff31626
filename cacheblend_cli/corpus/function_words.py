"""Function words of 17 languages: articles, prepositions, pronouns, question words. They are not searched: in a few
pages each would be as rare as a name."""

# ruff: noqa: RUF001

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from functools import lru_cache

_FUNCTION_WORDS = (
    # English
    "a about an and any are as at be been but by can could did do does for from get gets got had has have he her "
    "his how i if in into is it its many me much my of off on or our please s she should some t tell than that the "
    "their them there these they this those to us was we were what when where which who whom whose why will with "
    "would you your",
    # German
    "ab aber als am an auch auf aus bei bis bitte da damit das dass dem den der des die doch du durch ein eine "
    "einem einen einer eines er es für gibt haben hast hat hatte ich ihr im in ist ja kann kannst können lange man "
    "mein meine mich mir mit muss nach nicht noch nur ob oder ohne sein sich sie sind so um und uns unser unsere "
    "unter viel viele vom von vor wann war warum was welche welchem welchen welcher welches wem wen wenn wer werden "
    "wessen wie wieviel wir wird wo woher wohin zu zum zur über",
    # Dutch
    "aan al als bij dan dat de deze die dit door een en er had heb hebben heeft het hij hoe hoeveel ik in is je kan "
    "kunnen lang maar mag me met mij mijn moet naar niet nog of om ons onze ook op over te tot u uit van veel voor "
    "waar waarom wanneer waren was wat we welk welke wie wij worden wordt ze zijn zo zonder zou",
    # Swedish
    "alla att av blev bli blir de den det din du där efter en er ett finns fram från får för ha har hon hur i in "
    "inte jag kan man med mellan men min mitt mot mycket många måste ni nu när och om oss på sin ska som så till "
    "under upp ut vad var vara varför vart vem vi vid vilka vilken vilket är över",
    # Danish and Norwegian
    "af alle at blev blive bliver de den der det din du efter en er et findes for fra får ham han har hun hvad hva hvem "
    "hvilke hvilken hvilket hvor hvordan hvorfor hvornår i ikke jeg kan man mange med meget men min mit mod må ned "
    "nu når og om op os oss på sig sin skal som så til ud under var ved vi være mye noe noen å dere hos",
    # French
    "a ai au aux avec avez avons c ce ces cet cette combien comment d dans de depuis des dois doit donc du elle "
    "elles en est et eu fait faut il ils j je l la le les leur leurs lui là m ma mais me mes moi mon n ne nos notre "
    "nous on ont ou où par pas peut peux plus pour pourquoi puis qu quand que quel quelle quelles quels qui quoi s "
    "sa sans se ses si son sont sur ta te tes ton tu un une vos votre vous y à être",
    # Spanish
    "a al algo ante aquí como con cual cuales cuando cuanta cuantas cuanto cuantos de del desde donde e el ella "
    "ellos en entre era es esa ese eso esta este esto estos está están fue ha hace hacer hacia han hasta hay he la "
    "las le les lo los me mi mis muy más no nos o otra otro para pero por porque puede puedo que quien quienes se "
    "ser si sin sobre son su sus también te tengo tiene tienen tu tus un una unas uno unos y ya yo",
    # Portuguese
    "a ao aos as até com como da das de dela dele desde do dos e ela ele em entre era essa esse esta este está eu "
    "fica foi há isso isto já lhe mais mas me meu meus minha minhas muito na nas no nos não o onde os ou para pela "
    "pelas pelo pelos pode podem por porque posso quais qual quando quanta quantas quanto quantos que quem se sem "
    "ser seu seus sob sobre sua suas são também te tem tenho têm um uma umas uns",
    # Italian
    "a ad agli ai al alla alle anche c che chi ci come con cosa cui d da dagli dai dal dalla dalle degli dei del "
    "della delle dello di dopo dove e ed era essere fra gli ha hanno ho i il in io l la le lo loro ma mi mia mie "
    "miei mio negli nei nel nella nelle nello noi non nostra nostro o ogni per perché più posso può quale quali "
    "quando quanta quante quanti quanto quello questa questo qui s se sei si sia sono su sua sul sulla suo te ti "
    "tra tu tua tuo tutti un una uno vi",
    # Polish
    "a aby albo ale bez bo by być był była było co czego czemu czy czyj dla do gdy gdzie go i ich ile im ja jak "
    "jaka jaki jakich jakie jako jaką jego jej jest jestem już każdy kiedy kim kogo komu kto która które którego "
    "której który których którym którzy lub ma mają mam mamy mi mnie mogę może można mój na nad nam nas nasz nie "
    "niż o od on ona oni oraz po pod przed przez przy się skąd są tak tam te tego tej ten to trzeba tu ty tylko tym "
    "u w we więc wszystko z za ze żeby",
    # Czech
    "a aby ale ani asi až bez bude budu by byl byla byste být co do dokdy ho i jak jako jaká jaké jaký je jeho "
    "jejich její jen jestli ještě ji jsem jsi jsme jsou já k kam kde kdo kdy koho kolik komu která které kterém "
    "který kteří kvůli mají mezi mi mohu musí my má mám máme mít mě můj může na nad ne nebo není než nám nás náš o "
    "od odkud on ona oni po pod podle pro proč před při s se si smí ta tak také ten to tom tu ty u už v ve vy z za "
    "ze čí že",
    # Russian
    "а без бы был была были было быть в вам вас ваш во вот все вы где да для до его ее если есть еще ещё её же за и "
    "из или им их к как какая какие какое какой каком кем ко когда кого которая которые который кто куда ли мне "
    "могу может можем можете можешь можно мой мы на над надо нам нас наш не него нет но нужно о об он она они от "
    "откуда по под почему при про с  сколько со так там то тоже только ты у уже чего чем через что чтобы эта эти "
    "это этот я",
    # Ukrainian
    "а або але без би був була були було бути в вам вас ваш ви вона вони все від він де до з за зі й його к ким "
    "кого коли кому куди ми може можна між мій на над нам нас наш не немає ні о об по при про під с скільки та так "
    "там те ти то треба тільки у хто це цей ця ці через чи чий чого чому що щоб я як яка яке який якого які є і із "
    "їх її",
    # Hungarian
    "a ahol alatt amely ami az azt be csak de egy ehhez el ez ezt fel ha hogy hogyan hol honnan hova hová hány "
    "hányan hát ki kik kinek kinél kit kitől kivel kié le legyen lehet majd meddig meg mekkora mely melyik mennyi "
    "mennyibe mennyien mennyit mert mi mik mikor milyen minden mint mit mivel most már ne nekem nem nincs ott pedig "
    "s sem szerint te után vagy vagyok valaki van vannak volt által át én és össze ő",
    # Finnish
    "ehkä ei eivät en että he hän ja jo joka jos jotka kanssa keitä kenelle kenellä kenen ketkä koska kuin kuinka "
    "kuka kun kunka me mihin miksi mikä milla millainen mille milloin millä minne minua minulla minulle minun minä "
    "missä mistä mitkä mitä moneltako monta montako mutta myös ne niin noin nyt olemme olen oli olla on onko ovat "
    "pitää saa saada saako saan saavat se sen sillä sinä sitä tai te tämä tässä tätä vai vain voi voiko voin voivat "
    "vuoksi",
    # Turkish
    "acaba ama ancak bana bazı belki ben beni benim bir biz bize bu bunu da daha de değil diye gibi göre hangi "
    "hangisi hem hep her ile ise için kadar kaç kaçta ki kim kimde kime kimi kimin kimler mi mu mü mı nasıl ne "
    "neden nedir nerede nereden nereli neresi nereye niye niçin o olabilir olan olarak olur onlar onu onun sana sen "
    "siz tüm var ve veya ya yok zaman çok şey şu",
    # Greek
    "ένα έναν ένας έχει έχουν έχω ή αλλά αν από αυτά αυτή αυτό αυτός για γιατί δε δεν εάν είμαι είναι είχα εγώ εσύ "
    "η θα κάθε κάποιος και κατά μέχρι μία μας με μετά μια μου μπορεί μπορώ να ο οι ποιά ποια ποιο ποιοι ποιον ποιος "
    "ποιου ποιό που πού πρέπει πριν προς πόσα πόσες πόση πόσο πόσοι πόσος πότε πώς σας σε σου στα στη στην στις στο "
    "στον στους τα τη την της τι τις το τον του τους των ως όταν ότι όχι",
)


def function_words(words: Collection[str]) -> set[str]:
    """Return the articles, question words and the like among the words of a query, in the language that has most of
    them; among equals English."""
    folded = {word: _folded(word) for word in words}
    found = [{word for word, plain in folded.items() if plain in known} for known in _languages()]
    return max(found, key=len)


@lru_cache(maxsize=1)
def _languages() -> list[frozenset[str]]:
    return [frozenset(map(_folded, words.split())) for words in _FUNCTION_WORDS]


def _folded(word: str) -> str:
    """Return a word without accents."""
    if word.isascii():
        return word
    return "".join(c for c in unicodedata.normalize("NFKD", word) if unicodedata.category(c)[0] != "M")
