"""The way of a person through a sign-in: who asks, who you are, whether you may come in, what you allow.

    /oauth/authorize            a client asks; the request is checked and parked in the browser
    /oauth/sign-in              the ways to sign in
    /oauth/sign-in/{provider}   on to an identity provider
    /oauth/callback/{provider}  back from it
    /oauth/link                 a sign-in link, or its code
    /oauth/consent              what the client may do; then back to it with a code

After the first step the client's redirect is proven, and an answer may lead there.  What is wrong between the gate and
an identity provider is a page: it may be somebody else's doing.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlencode, urlsplit

from msgspec.structs import replace
from starlette.routing import Route

from asyncgate.extras.oauth import admission, consent, pages, requests, wire
from asyncgate.extras.oauth.clients import find_client
from asyncgate.extras.oauth.grants import make_grant
from asyncgate.extras.oauth.links import use_link
from asyncgate.extras.oauth.parked import Parked, drop_parked, find_newest, find_parked, park
from asyncgate.extras.oauth.providers import DeniedUpstream
from asyncgate.extras.oauth.server import AuthorizationServer, Endpoint, Handler
from asyncgate.parts.model import errors, stored_oauth
from asyncgate.parts.model.connection import group_address

SignInStep = Callable[[wire.Request], Awaitable[wire.Answer]]

PROMPTS = {"login", "consent", "select_account"}        # OpenID Connect Core 3.1.2.1; `none` asks for the impossible
RETURN = "<p>You may close this window, and connect again from your client.</p>"
LOST = ("This sign-in has ended, or another browser began it. Go back to your client and connect again. If this comes "
        "again, allow cookies for this site, and open the gate under its public address.")


def routes(server: AuthorizationServer) -> list[Route]:
    """Return the paths of the sign-in; raises StartupError for contradictory settings."""
    return SignIn(server).routes()


class SignIn:
    """The steps of a sign-in."""

    def __init__(self, server: AuthorizationServer) -> None:
        admission.check_rules(server.settings)
        self.server, self.base = server, urlsplit(server.issuer).path
        self.providers = server.providers

    def routes(self) -> list[Route]:
        """Return the paths."""
        steps: dict[str, dict[str, SignInStep]] = {
            "/oauth/authorize": {"GET": self.begin, "POST": self.begin},
            "/oauth/sign-in": {"GET": self.show_ways},
            "/oauth/sign-in/{provider}": {"GET": self.leave},
            "/oauth/callback/{provider}": {"GET": self.come_back},
            "/oauth/link": {"GET": self.show_link, "POST": self.take_code},
            "/oauth/consent": {"GET": self.ask, "POST": self.decide}}
        return [Route(path, Endpoint(self.server, {verb: self.make_handler(step) for verb, step in verbs.items()}))
                for path, verbs in steps.items()]

    def make_handler(self, step: SignInStep) -> Handler:
        """Return the handler of a step: its refusals are pages, or go to a client whose redirect is proven."""
        async def handle(server: AuthorizationServer, request: wire.Request) -> wire.Answer:
            try:
                return await step(request)
            except requests.RefusedRequest as refusal:
                self.note("oauth_refused", str(refusal), client_id=refusal.asked.client_id, code=refusal.code)
                return requests.redirect_back(server, refusal.asked, **refusal.parameters())
            except requests.BadRequestPage as refusal:
                self.note("oauth_refused", refusal.because)
                return pages.show_error("This request cannot be answered", str(refusal), RETURN)
            except admission.SignInRefused as refusal:
                self.note("sign_in_refused", refusal.because)
                return pages.show_error("You cannot sign in", str(refusal), RETURN, status=403)
            except wire.OAuthError as refusal:
                self.note("oauth_refused", refusal.because)
                return pages.show_error("This request cannot be answered", str(refusal), RETURN, status=refusal.status)
            except errors.GateError as refusal:
                return pages.show_error("The gate cannot answer now", str(refusal), status=refusal.status)
        return handle

    def note(self, event: str, because: str, **details: str) -> None:
        """Note a refusal in the operator's log, with its real reason; strangers have a budget of lines."""
        from asyncgate.parts.identity.audit import current_visitor

        place = group_address(current_visitor().get("ip") or "")
        self.server.auditor.note(self.server.settings.default_tenant_id, event, "warning", place=place, reason=because,
                                 **details)

    # Who are you?

    async def begin(self, request: wire.Request) -> wire.Answer:
        """Check what a client asks for, park it, and ask who the person is."""
        parameters = request.query() if request.method == "GET" else request.form()
        client, asked = await requests.read_request(self.server, parameters)
        wished = set(parameters.get("prompt", "").split())
        if "none" in wished:
            raise requests.RefusedRequest(asked, "login_required", "people sign in each time; send no prompt=none")
        parked = Parked(secrets.token_hex(16), self.server.engine.backend.now(), asked,
                        " ".join(sorted(wished & PROMPTS)))
        if len(self.providers) == 1 and not self.server.oauth.login_links:
            return await self.send_upstream(request, parked, *self.providers)
        return self.show_login(request, parked, client)

    async def show_ways(self, request: wire.Request) -> wire.Answer:
        """Show the login page again, for somebody who is not who the gate thinks."""
        parked = self.find(request, request.query().get("sign_in", ""))
        prompt = " ".join(sorted({*parked.prompt.split(), "select_account"}))
        client = await self.find_client(parked)
        return self.show_login(request, replace(forget_person(parked), prompt=prompt), client)

    def show_login(self, request: wire.Request, parked: Parked, client: stored_oauth.OAuthClient,
                   wrong: str = "") -> wire.Answer:
        """Answer with the login page."""
        ask = urlencode({"sign_in": parked.id})
        ways = [pages.LoginWay(provider.title, f"{self.base}/oauth/sign-in/{name}?{ask}")
                for name, provider in self.providers.items()]
        form = (f"{self.base}/oauth/link", parked.id) if self.server.oauth.login_links else None
        return pages.show_login(client.name, consent.find_place(parked.asked.redirect_uri), ways, form,
                                pages.list_form_targets(parked.asked.redirect_uri),
                                park(self.server, request, parked), wrong, 403 if wrong else 200,
                                trusted=client.trusted)

    async def leave(self, request: wire.Request) -> wire.Answer:
        """Send the browser to an identity provider."""
        parked = self.find(request, request.query().get("sign_in", ""))
        return await self.send_upstream(request, parked, request.scope["path_params"]["provider"])

    async def send_upstream(self, request: wire.Request, parked: Parked, name: str) -> wire.Answer:
        """Send the browser to an identity provider, with a state, a nonce and a challenge of this sign-in alone."""
        if (provider := self.providers.get(name)) is None:
            raise admission.SignInRefused("There is no such way to sign in.", "no such identity provider")
        parked = replace(forget_person(parked), provider=name, state=f"{parked.id}.{secrets.token_urlsafe(24)}",
                         nonce=secrets.token_urlsafe(24), verifier=secrets.token_urlsafe(32))
        return wire.redirect_to(await provider.name_login_url(parked), *park(self.server, request, parked))

    async def come_back(self, request: wire.Request) -> wire.Answer:
        """Take the answer of an identity provider: to the browser that was sent there, from there, and once."""
        query, name = request.query(), request.scope["path_params"]["provider"]
        parked = self.find(request, query.get("state", "").partition(".")[0])
        if not parked.state or not hmac.compare_digest(parked.state.encode(), query.get("state", "").encode()):
            raise admission.SignInRefused(LOST, "the state of the callback is not the one that was sent, or came twice")
        if parked.provider != name:     # its code would go to the wrong provider (RFC 9700 4.4)
            raise admission.SignInRefused(LOST, f"the callback is of {name}, but the sign-in went to {parked.provider}")
        spent = park(self.server, request, forget_person(parked))
        try:
            who = await self.providers[name].prove_person(query, parked)
            return self.go_on(request, parked, await admission.admit(self.server, who))
        except DeniedUpstream as refusal:
            self.note("sign_in_refused", str(refusal), provider=name)
            return self.end(parked, error="access_denied", error_description="the person did not sign in")
        except admission.SignInRefused as refusal:
            return await self.refuse(parked, refusal, spent)

    async def show_link(self, request: wire.Request) -> wire.Answer:
        """Show the button of a sign-in link; looking at the page spends nothing."""
        if (parked := find_newest(self.server, request)) is None:
            return pages.show_error("Start in your client", "This link signs you in to a client that has asked for "
                                    "access in this browser. Connect from your client first; then open the link "
                                    "again, or type its code on the page that appears.", status=200)
        client = await self.find_client(parked)
        return pages.show_sign_in_link(f"{self.base}/oauth/link", request.query().get("code", ""), parked.id,
                                       client.name, pages.list_form_targets(parked.asked.redirect_uri))

    async def take_code(self, request: wire.Request) -> wire.Answer:
        """Sign somebody in by the code of a sign-in link."""
        form = request.form()
        parked = self.find(request, form.get("sign_in", ""))
        try:
            return self.go_on(request, parked, await use_link(self.server, form.get("code", "")))
        except admission.SignInRefused as refusal:
            self.note("sign_in_refused", refusal.because)
            return self.show_login(request, parked, await self.find_client(parked), wrong=str(refusal))

    def go_on(self, request: wire.Request, parked: Parked, user: stored_oauth.User) -> wire.Answer:
        """Send the browser on to the consent page: the code of a provider does not stay in its address."""
        parked = replace(forget_person(parked), user_id=user.user_id)
        path = f"{self.base}/oauth/consent?{urlencode({'sign_in': parked.id})}"
        return wire.redirect_to(path, *park(self.server, request, parked))

    # What do you allow?

    async def ask(self, request: wire.Request) -> wire.Answer:
        """Ask the person, unless there is nothing to ask."""
        parked = self.find(request, request.query().get("sign_in", ""))
        client = await self.find_client(parked)
        try:
            user, tenant = await self.find_user(parked, client)
            scopes = admission.choose_scopes(user, parked.asked.scopes)
        except admission.SignInRefused as refusal:
            return await self.refuse(parked, refusal, [drop_parked(self.server, parked)])
        if "consent" not in parked.prompt.split() and await consent.is_allowed(
                self.server, client, user, parked.asked.redirect_uri, scopes):
            return await self.grant(parked, client, user, scopes)
        parked = replace(parked, csrf=secrets.token_urlsafe(24), shown=scopes)
        return self.show_question(request, parked, client, user, tenant)

    def show_question(self, request: wire.Request, parked: Parked, client: stored_oauth.OAuthClient,
                      user: stored_oauth.User, tenant: str) -> wire.Answer:
        """Answer with the consent page."""
        uri = parked.asked.redirect_uri
        answer = pages.show_consent(pages.ConsentRequest(
            client=client.name, host=consent.find_place(uri),
            document_host=urlsplit(client.client_id).netloc.lower() if client.origin == "document" else None,
            local=consent.is_local(uri),
            person=user.name or user.email or user.principal_id, tenant=tenant, principal=str(user.principal),
            role=user.role, scopes=parked.shown, path=f"{self.base}/oauth/consent",
            again=f"{self.base}/oauth/sign-in?{urlencode({'sign_in': parked.id})}",
            fields={"sign_in": parked.id, "csrf": parked.csrf}, form_to=pages.list_form_targets(uri)))
        answer.headers += park(self.server, request, parked)
        return answer

    async def decide(self, request: wire.Request) -> wire.Answer:
        """Take the person's answer, which must come from the page that this browser was shown."""
        form = request.form()
        parked = self.find(request, form.get("sign_in", ""))
        if not parked.csrf or not hmac.compare_digest(parked.csrf.encode(), form.get("csrf", "").encode()):
            raise admission.SignInRefused(LOST, "the consent is not from the page that this browser was shown")
        client = await self.find_client(parked)
        try:
            user, _ = await self.find_user(parked, client)
            scopes = admission.choose_scopes(user, parked.shown)
        except admission.SignInRefused as refusal:
            return await self.refuse(parked, refusal, [drop_parked(self.server, parked)])
        if form.get("answer") != "allow":
            self.note("consent_denied", "the person denied it", user_id=user.user_id, client_id=client.client_id)
            consent.note_consent(self.server, user, client, "consent_denied")
            return self.end(parked, error="access_denied", error_description="the person denied access")
        await consent.give_consent(self.server, client, user, parked.asked.redirect_uri, scopes)
        return await self.grant(parked, client, user, scopes)

    async def grant(self, parked: Parked, client: stored_oauth.OAuthClient, user: stored_oauth.User,
                    scopes: frozenset[str]) -> wire.Answer:
        """Send the browser back to the client with a code."""
        return self.end(parked, code=await make_grant(self.server, client, parked.asked, user, scopes))

    def end(self, parked: Parked, **parameters: str) -> wire.Answer:
        """Send the browser back to the client, and end the sign-in."""
        answer = requests.redirect_back(self.server, parked.asked, **parameters)
        answer.headers.append(drop_parked(self.server, parked))
        return answer

    async def refuse(self, parked: Parked, refusal: admission.SignInRefused,
                     headers: list[tuple[bytes, bytes]]) -> wire.Answer:
        """Tell a person why not, with a way back to the client, which is told too then."""
        self.note("sign_in_refused", refusal.because, provider=parked.provider)
        back = requests.redirect_back(self.server, parked.asked, error=refusal.code,
                                      error_description="the person may not sign in")
        client = await self.find_client(parked)
        link = pages.show_link(f"Back to {client.name}", dict(back.headers)[b"location"].decode("ascii"))
        return pages.show_error("You cannot sign in", str(refusal), link, status=403, headers=headers)

    # What the browser brings.

    def find(self, request: wire.Request, id: str) -> Parked:
        """Return a sign-in that this browser has begun; raises SignInRefused."""
        if (parked := find_parked(self.server, request, id)) is None:
            raise admission.SignInRefused(LOST, "the browser has no such sign-in")
        return parked

    async def find_client(self, parked: Parked) -> stored_oauth.OAuthClient:
        """Return the client that asks; raises SignInRefused if it was removed meanwhile."""
        if (client := await find_client(self.server, parked.asked.client_id)) is None:
            raise admission.SignInRefused("An administrator has removed the client that asks.",
                                          "the client was removed")
        return client

    async def find_user(self, parked: Parked, client: stored_oauth.OAuthClient) -> tuple[stored_oauth.User, str]:
        """Return who has signed in, with the name of the tenant; raises SignInRefused."""
        user = await self.server.directory.find(stored_oauth.User, parked.user_id) if parked.user_id else None
        if user is None:
            raise admission.SignInRefused(LOST, "nobody has signed in")
        if user.disabled_at is not None:
            raise admission.SignInRefused("An administrator has disabled your account.",
                                          f"user {user.user_id} is disabled")
        return user, await admission.check_tenant(self.server, user, client)


def forget_person(parked: Parked) -> Parked:
    """Return a sign-in in which nobody has signed in."""
    return replace(parked, provider="", state="", nonce="", verifier="", user_id="", csrf="", shown=frozenset())
