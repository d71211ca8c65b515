"""What a conversation means: output to events, client histories to one canonical form, words to an effort.

Shared by the server and the Dify plugin, so it needs nothing but the standard library. Importing the package
loads nothing; the modules are:

    events      the closed set of events, and the message they fold to
    parser      ChannelParser, fold, parse_text
    dialects    DIALECTS, detect; one grammar per family of models
    scanner     cut text at markers
    history     sanitise: what clients send back
    template    what a chat template can render
    effort      how much the model is to think, in any spelling
"""
