"""The syntaxes in which models write calls to tools. A family is a row of `families.py` that names one of them.

    base         what a syntax is
    json_object  {"name": …, "arguments": {…}}, one, several, or a list of them
    named_json   a name, a separator, and JSON arguments
    xml          <function=f><parameter=a>…, <invoke name="f"><parameter name="a">…
    pairs        a name, then <arg_key>a</arg_key><arg_value>…</arg_value>
    elements     MiniMax M3: an element for each value, in each other
    xtml         Kimi K3: typed arguments
    gemma        call:f{a:<|"|>…<|"|>}
    pythonic     [f(a=1)], parsed and never evaluated

They know text, tools and schemas; not where in a reply a call may stand, nor what its markers mean there.
"""
