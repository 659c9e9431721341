"""Identity providers: OpenID Connect by discovery, and GitHub, which does not speak it (OpenID Connect Core 1.0).

Security: only the issuer that the operator's discovery URL belongs to is believed.  It must be in the discovery
document, in the ID token, and in the answer to the browser if the provider sends it there (RFC 9207).  All fetches go
through the guard of outgoing calls, follow no redirect, and are limited in size and time.
"""

from __future__ import annotations

import base64
import hmac
import logging
import time
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from joserfc.util import urlsafe_b64decode
from msgspec import Meta, Struct

from asyncgate.extras.oauth.admission import Person, SignInRefused
from asyncgate.extras.oauth.parked import Parked
from asyncgate.extras.oauth.user_rows import read_email
from asyncgate.parts.identity import jwt
from asyncgate.parts.model import errors
from asyncgate.parts.model.settings import IdentityProvider, Settings

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger("asyncgate")
T = TypeVar("T")

DISCOVERY = "/.well-known/openid-configuration"
DISCOVERY_SECONDS = 3600.0      # how long a discovery document is used before it is fetched again
LEEWAY_SECONDS = 30
MOST_ERROR_LENGTH = 100                 # characters of a provider's error in the audit log
MOST_GROUPS = 1000
GITHUB, GITHUB_API = "https://github.com", "https://api.github.com"
FOR_OIDC, FOR_GITHUB = ("openid", "email", "profile"), ("read:user", "user:email")
AS_JSON = {"accept": "application/json"}

Subject = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[!-~]+$(?!\n)")]


class DeniedUpstream(Exception):
    """The person, or the provider for it, said no."""


class Provider(Protocol):
    """An identity provider."""

    title: str

    async def name_login_url(self, parked: Parked) -> str:
        """Return where the browser goes; raises SignInRefused."""

    async def prove_person(self, answer: dict[str, str], parked: Parked) -> Person:
        """Return whom the answer of the provider names; raises SignInRefused or DeniedUpstream."""


def make_providers(settings: Settings, issuer: str) -> dict[str, Provider]:
    """Return the identity providers by name; raises StartupError for contradictory settings."""
    providers: dict[str, Provider] = {}
    for at, provider in enumerate(settings.security.oauth.providers, 1):
        where = f"security.oauth.providers: number {at}"
        if not provider.name or not provider.client_id or provider.name in providers:
            raise errors.StartupError(f"{where} needs a client_id and a unique name")
        if provider.kind == "oidc" and not provider.discovery_url:
            raise errors.StartupError(
                f"{where}, {provider.name}, needs discovery_url, such as https://id.example.com{DISCOVERY}")
        make = GitHub if provider.kind == "github" else OpenId
        providers[provider.name] = make(provider, settings, f"{issuer}/oauth/callback/{provider.name}")
    return providers


class ProviderHttp:
    """What both kinds of provider share: their settings, and calls that are guarded."""

    def __init__(self, provider: IdentityProvider, settings: Settings, callback: str, *,
                 now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.settings, self.callback, self.now, self.clock = provider, settings, callback, now, clock
        self.title = provider.title or provider.name.replace("-", " ").title()
        self.http: httpx2.AsyncClient | None = None

    def client(self) -> httpx2.AsyncClient:
        """Return the HTTP client."""
        self.http = self.http or jwt.make_fetcher(self.settings)
        return self.http

    async def call(self, verb: str, url: str, form: type[T], **more: Any) -> T:
        """Call the provider, and read its answer; raises SignInRefused without a word of what it holds."""
        import httpx2

        try:
            answer = await self.client().request(verb, url, **more)
            if answer.status_code != 200:
                self.refuse(f"{urlsplit(url).path} answered {answer.status_code} {read_error(answer.content)}".strip())
            return jwt.decode_strictly(answer.content, form)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            self.refuse(f"{urlsplit(url).path} cannot be fetched: {type(error).__name__}: {error}")
        except jwt.UNFIT as error:
            self.refuse(f"the answer of {urlsplit(url).path} is not what it should be: {jwt.reason_of(error)[1]}")

    def refuse(self, because: str) -> NoReturn:
        """Raise SignInRefused."""
        raise SignInRefused(f"{self.title} did not prove who you are. Connect again from your client; if this comes "
                            "again, an administrator finds the reason in the audit log.", because)

    def check_answer(self, answer: dict[str, str]) -> str:
        """Return the code of an answer to the browser; raises DeniedUpstream or SignInRefused."""
        if (error := answer.get("error")) == "access_denied":
            raise DeniedUpstream(f"{self.config.name} says access_denied")
        if error:
            self.refuse(f"{self.config.name} says {error[:MOST_ERROR_LENGTH]}")
        if not (code := answer.get("code")):
            self.refuse("the callback has no code")
        return code

    def make_query(self, parked: Parked, scopes: tuple[str, ...], **more: str) -> str:
        """Return the query that asks a provider who somebody is."""
        challenge = base64.urlsafe_b64encode(sha256(parked.verifier.encode()).digest()).rstrip(b"=").decode()
        return urlencode({"response_type": "code", "client_id": self.config.client_id, "redirect_uri": self.callback,
                          "scope": " ".join(scopes), "state": parked.state, "code_challenge": challenge,
                          "code_challenge_method": "S256", **more}, quote_via=quote)


def read_error(content: bytes) -> str:
    """Return the error code of a refusal (RFC 6749 5.2); its description may repeat what was sent."""
    try:
        return str(msgspec.json.decode(content, type=dict[str, Any]).get("error", ""))[:MOST_ERROR_LENGTH]
    except (ValueError, RecursionError):
        return ""


# OpenID Connect.


class Discovery(Struct, frozen=True):
    """What is used of a discovery document (OpenID Connect Discovery 1.0)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class Tokens(Struct, frozen=True):
    """What is used of the answer of a token endpoint."""

    id_token: str
    access_token: str = ""


class IdToken(Struct, frozen=True):
    """The claims of an ID token that decide (OpenID Connect Core 2)."""

    iss: str
    sub: Subject
    aud: str | list[str]
    exp: Annotated[float, Meta(ge=0)]
    iat: Annotated[float, Meta(ge=0)]
    nonce: str
    azp: str | None = None


class OpenId(ProviderHttp):
    """A provider that speaks OpenID Connect."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        url = self.config.discovery_url
        self.url = url if url.endswith(DISCOVERY) else url.rstrip("/") + DISCOVERY
        self.known: Discovery | None = None
        self.read_at = float("-inf")
        self.ring: jwt.KeyRing | None = None

    async def discover(self) -> Discovery:
        """Return the discovery document; while it cannot be fetched, the last one stays."""
        age = self.clock() - self.read_at
        if self.known is None or age >= DISCOVERY_SECONDS:
            if self.known is not None:      # the next look is in a minute, whatever comes of this one
                self.read_at = self.clock() - DISCOVERY_SECONDS + jwt.REFETCH_SECONDS
            try:
                self.take(await self.call("GET", self.url, Discovery, headers=AS_JSON))
            except SignInRefused as refusal:
                if self.known is None:
                    raise
                log.warning("the discovery document of %s stays as it was: %s", self.config.name, refusal.because)
        assert self.known is not None
        return self.known

    def take(self, discovery: Discovery) -> None:
        """Use a discovery document, if it is the one of the issuer that the URL belongs to."""
        if not self.is_issuer(discovery.issuer):
            self.refuse(f"the discovery document of {self.url} is of the issuer {discovery.issuer[:MOST_ERROR_LENGTH]}")
        for endpoint in (discovery.authorization_endpoint, discovery.token_endpoint, discovery.jwks_uri):
            if urlsplit(endpoint).scheme not in ("https", "http") or not endpoint.isascii():
                self.refuse("the discovery document names an endpoint that is not a URL")
        if self.ring is None or self.known is None or self.known.jwks_uri != discovery.jwks_uri:
            self.ring = jwt.KeyRing([], self.client(), discovery.jwks_uri, self.clock)
        self.known, self.read_at = discovery, self.clock()

    async def name_login_url(self, parked: Parked) -> str:
        """Return where the browser goes."""
        discovery = await self.discover()
        prompt = " ".join(word for word in parked.prompt.split() if word in ("login", "select_account"))
        more = {"nonce": parked.nonce, **({"prompt": prompt} if prompt else {})}
        joint = "&" if urlsplit(discovery.authorization_endpoint).query else "?"
        return f"{discovery.authorization_endpoint}{joint}{self.make_query(parked, self.config.scopes, **more)}"

    async def prove_person(self, answer: dict[str, str], parked: Parked) -> Person:
        """Return whom the provider names."""
        discovery = await self.discover()
        sends_iss = "iss" in answer or discovery.authorization_response_iss_parameter_supported       # RFC 9207 2.4
        if sends_iss and answer.get("iss") != discovery.issuer:
            self.refuse("the iss of the callback is not that of the provider")
        code = self.check_answer(answer)
        tokens = await self.exchange(discovery, code, parked)
        claims = await self.prove_token(discovery, tokens.id_token, parked.nonce)
        wanted = {"email", self.config.groups_claim}
        if tokens.access_token and discovery.userinfo_endpoint and not wanted <= claims.keys():
            more = await self.call("GET", discovery.userinfo_endpoint, dict[str, Any],
                                   headers={**AS_JSON, "authorization": f"Bearer {tokens.access_token}"})
            if more.get("sub") != claims["sub"]:
                self.refuse("userinfo is about somebody else")
            claims = {**more, **claims}
        return read_person(self.config, discovery.issuer, claims)

    async def exchange(self, discovery: Discovery, code: str, parked: Parked) -> Tokens:
        """Exchange a code for an ID token."""
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": self.callback,
                "code_verifier": parked.verifier}
        headers, secret = dict(AS_JSON), self.config.client_secret
        if secret and "client_secret_basic" in discovery.token_endpoint_auth_methods_supported:
            pair = f"{quote(self.config.client_id, safe='')}:{quote(secret, safe='')}"        # RFC 6749 2.3.1
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": self.config.client_id, **({"client_secret": secret} if secret else {})}
        return await self.call("POST", discovery.token_endpoint, Tokens, data=form, headers=headers)

    def is_issuer(self, issuer: Any) -> bool:
        """Whether an issuer is this provider, as far as its discovery URL tells."""
        return isinstance(issuer, str) and issuer.rstrip("/") == self.url.removesuffix(DISCOVERY).rstrip("/")

    async def verify(self, token: str, kind: str = "jwt") -> bytes:
        """Return the content of a token of a kind that the provider has signed; raises one of UNFIT."""
        assert self.ring is not None
        self.ring.freshen()
        return jwt.verify_signature(token, await self.ring.find(name_key(token, kind)))

    async def prove_token(self, discovery: Discovery, token: str, nonce: str) -> dict[str, Any]:
        """Return the claims of an ID token after every check; raises SignInRefused."""
        try:
            if len(token) > 2 * jwt.MOST_TOKEN_BYTES:
                raise jwt.Flaw("the ID token is too long")
            content = await self.verify(token)
            claims = jwt.decode_strictly(content, IdToken)
            if flaw := find_flaw_of_identity(claims, discovery.issuer, self.config.client_id, nonce, self.now()):
                raise jwt.Flaw(flaw)
            return msgspec.json.decode(content, type=dict[str, Any])
        except jwt.UNFIT as error:
            self.refuse(f"the ID token is refused: {jwt.reason_of(error)[1]}")


def name_key(token: str, kind: str = "jwt") -> str | None:
    """Return the id of the key that a token of a kind names; raises Flaw for an unsafe header (RFC 8725)."""
    header = jwt.decode_strictly(urlsafe_b64decode(token.partition(".")[0].encode()), dict[str, Any])
    if header.get("alg") != "RS256":
        raise jwt.Flaw("alg is not RS256")
    if jwt.FOREIGN & header.keys():
        raise jwt.Flaw("the header contains or names a key")
    if str(header.get("typ", "jwt")).lower().removeprefix("application/") != kind:      # for example an access token
        raise jwt.Flaw(f"typ is not {kind}")
    kid = header.get("kid")
    if not isinstance(kid, str | None):
        raise jwt.Flaw("kid is not a text")
    return kid


def find_flaw_of_identity(claims: IdToken, issuer: str, client_id: str, nonce: str, now: float) -> str | None:
    """Return why an ID token is not for this sign-in (OpenID Connect Core 3.1.3.7); None if it is."""
    audience = [claims.aud] if isinstance(claims.aud, str) else claims.aud
    wrong = {
        "iss is another issuer": claims.iss != issuer,
        "aud does not name this gate": client_id not in audience,
        "azp is another client": claims.azp != client_id if len(audience) > 1 else claims.azp not in (None, client_id),
        "nonce is of another sign-in": not hmac.compare_digest(claims.nonce.encode(), nonce.encode()),
        "exp has passed": now >= claims.exp + LEEWAY_SECONDS,
        "iat is in the future": claims.iat > now + LEEWAY_SECONDS,
    }
    return next((what for what, is_so in wrong.items() if is_so), None)


def read_person(provider: IdentityProvider, issuer: str, claims: dict[str, Any]) -> Person:
    """Return the person of proven claims; an e-mail address counts only if the provider has verified it."""
    verified = claims.get("email_verified") is True or claims.get("email_verified") == "true"
    email = read_email(claims.get("email")) if verified else ""
    name, groups = claims.get("name") or claims.get("preferred_username"), claims.get(provider.groups_claim)
    listed = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else []
    return Person(provider.name, issuer, claims["sub"], email, name[:200] if isinstance(name, str) else "",
                  frozenset([group for group in listed[:MOST_GROUPS] if isinstance(group, str)]))


# GitHub.


class GitHubTokens(Struct, frozen=True):
    """What is used of GitHub's token, or of its refusal, which is a 200."""

    access_token: str = ""
    error: str = ""


class GitHubUser(Struct, frozen=True):
    """What is used of a GitHub user; the login changes hands, the id does not."""

    id: Annotated[int, Meta(ge=1)]
    login: str
    name: str | None = None


class GitHubEmail(Struct, frozen=True):
    """One e-mail address of a GitHub user."""

    email: str
    primary: bool = False
    verified: bool = False


class GitHub(ProviderHttp):
    """GitHub, or a GitHub Enterprise Server, whose URL is then the discovery_url."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.issuer = self.config.discovery_url.rstrip("/") or GITHUB
        self.api = GITHUB_API if self.issuer == GITHUB else f"{self.issuer}/api/v3"
        self.title = self.config.title or "GitHub"

    async def name_login_url(self, parked: Parked) -> str:
        """Return where the browser goes."""
        scopes = FOR_GITHUB if self.config.scopes == FOR_OIDC else self.config.scopes
        more = {"prompt": "select_account"} if "select_account" in parked.prompt.split() else {}
        return f"{self.issuer}/login/oauth/authorize?{self.make_query(parked, scopes, **more)}"

    async def prove_person(self, answer: dict[str, str], parked: Parked) -> Person:
        """Return whom GitHub names."""
        form = {"client_id": self.config.client_id, "client_secret": self.config.client_secret,
                "code": self.check_answer(answer), "redirect_uri": self.callback, "code_verifier": parked.verifier}
        tokens = await self.call("POST", f"{self.issuer}/login/oauth/access_token", GitHubTokens, data=form,
                                 headers=AS_JSON)
        if not tokens.access_token:
            self.refuse(f"GitHub gave no token: {tokens.error[:MOST_ERROR_LENGTH]}")
        headers = {"accept": "application/vnd.github+json", "authorization": f"Bearer {tokens.access_token}",
                   "user-agent": "asyncgate"}
        user = await self.call("GET", f"{self.api}/user", GitHubUser, headers=headers)
        emails = await self.call("GET", f"{self.api}/user/emails", list[GitHubEmail], headers=headers)
        email = next((address.email for address in emails if address.primary and address.verified), "")
        return Person(self.config.name, self.issuer, str(user.id), read_email(email), (user.name or user.login)[:200])
