"""The authorization server: people sign in, allow a client in, and the client gets access tokens (spec 21.2.1).

    requests      what a client asks for at /oauth/authorize, and whether it may ask
    redirects     which redirect URIs are good, and equal
    clients       which clients may ask: registered, registered by themselves, named by their metadata document
    documents     the metadata documents by which clients are named
    assertions    what clients sign to prove themselves
    registration  clients that register themselves, and those that nobody uses any more
    budgets       how often strangers may make the gate work
    client_admin  operations on clients
    sign_in       the way of a person: who are you, may you come in, what do you allow
    parked        a sign-in under way, sealed in a cookie of the browser
    providers     identity providers: OpenID Connect, GitHub
    links         sign-in links, where there is no identity provider
    admission     which people may come in, and as whom
    user_rows     the ids and the scopes of people
    users         operations on people
    consent       what the person allows
    pages         what the person sees
    tokens        codes and refresh tokens against access tokens, at /oauth/token and /oauth/revoke
    enterprise    what a company's identity provider says about a person, against an access token
    metadata      the documents from which clients learn all this
    server        joins them; one instance serves a gate

The keys that sign access tokens, and which tokens are refused although they have not expired, are in parts/identity.
Unless security.oauth.enabled is set, only what administers its rows is imported.
"""
