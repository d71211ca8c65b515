"""What a conversation means: output to events, client histories to one canonical form, words to an effort.

Shared by the server and the Dify plugin, so it needs nothing but the standard library. Importing the package
loads nothing; the modules are:

    events               the closed set of events, and the message they fold to
    parser               ChannelParser, fold, parse_text
    dialects             DIALECTS, detect; one object per family of models
    tools                a request's tools, to match the calls a model writes
    scanner              cut text at markers
    stop_strings         end an answer before the first of some texts
    quoting              whether markup in a text is used or only talked about
    history              sanitise: repair what clients send back
    echo                 parse an assistant's text as clients echo it
    message_parts        the fields and parts of messages that mean more than text
    template             what a chat template can render
    effort               how much the model should reason, in any spelling
    background_requests  titles, tags and the like, known by the words of clients' own prompts
    json_values          how error messages name and quote JSON values
"""
