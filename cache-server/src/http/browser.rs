//! Refuses requests that a web page of another site sent through the browser of somebody on this machine.
//!
//! A server without tokens trusts every process that can connect, and a browser is such a process.
//!
//! Invariants:
//! 1. Without tokens, a TCP request names this server as its host. So a page whose own name leads to this
//!    machine (DNS rebinding) reads nothing. Probes are exempt: they say `ok` and do nothing.
//! 2. A request that another site's page sent (`Origin`, `Sec-Fetch-Site`) is refused, with tokens, too.
//! 3. A request that changes something has a header or a method that a browser does not send to another site
//!    without asking the server first. The server never agrees to that question (it sends no CORS header).
//! 4. `GET` and `HEAD` change nothing that another request can see, except that bytes come into the cache.

use super::error::{ApiError, ApiResult};
use crate::tenancy::auth::{AllowedHosts, Peer};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header, request::Parts};
use fletch_api::{Code, headers, routes};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Routes that any host may name: probes.
const PROBES: [&str; 3] = [routes::LIVEZ, routes::STARTUPZ, routes::READYZ];

/// What a server demands of a request.
#[derive(Debug, Clone, Copy)]
pub struct BrowserRules<'a> {
    /// The hosts that a request may name.
    pub hosts: &'a AllowedHosts,
    /// Whether requests need a token. Browsers send none, so the host does not matter then.
    pub needs_token: bool,
    /// Whether the connection speaks TLS.
    pub tls: bool,
}

impl BrowserRules<'_> {
    /// Checks a request by its head.
    ///
    /// # Errors
    /// [`Code::Misdirected`], [`Code::CrossSite`] and [`Code::UnsupportedType`].
    pub fn check(&self, peer: Peer, head: &Parts) -> ApiResult<()> {
        if !self.needs_token && peer.may_be_browser() && !PROBES.contains(&head.uri.path()) {
            self.check_host(head)?;
        }
        self.check_site(head)?;
        check_type(&head.method, &head.headers)
    }

    fn check_host(&self, head: &Parts) -> ApiResult<()> {
        let mut named = named_hosts(head).peekable();
        if named.peek().is_none() {
            return Err(misdirected("the request names no host".to_owned()));
        }
        match named.find(|host| !host.is_some_and(|h| self.hosts.allows(h, self.scheme()))) {
            Some(host) => Err(misdirected(format!("the request names the host {:?}", host.unwrap_or("")))),
            None => Ok(()),
        }
    }

    fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    fn check_site(&self, head: &Parts) -> ApiResult<()> {
        for value in head.headers.get_all(SEC_FETCH_SITE) {
            if !matches!(value.as_bytes(), b"same-origin" | b"none") {
                return Err(cross_site(&SEC_FETCH_SITE, value));
            }
        }
        for value in head.headers.get_all(header::ORIGIN) {
            let page = value.to_str().ok().and_then(|v| v.split_once("://"));
            let own = |(scheme, page): (&str, &str)| {
                let same = |host: Option<&str>| host.is_some_and(|h| h.eq_ignore_ascii_case(page));
                // The port of this server speaks TLS, so it sent no page by plain HTTP.
                let from_here = !self.tls || scheme == "https";
                from_here && named_hosts(head).any(same) || self.hosts.names(page, scheme)
            };
            if !page.is_some_and(own) {
                return Err(cross_site(&header::ORIGIN, value));
            }
        }
        Ok(())
    }
}

/// Returns every host that a request names: in its request line and in `Host`. `None` stands for no text.
fn named_hosts(head: &Parts) -> impl Iterator<Item = Option<&str>> {
    let line = head.uri.authority().map(|a| Some(a.as_str()));
    line.into_iter().chain(head.headers.get_all(header::HOST).iter().map(|v| v.to_str().ok()))
}

/// Checks that a request which changes something has a type that no form of a web page can send.
///
/// A browser asks the server before it sends `PUT` or `DELETE` to another site, and before it sends `POST`
/// with a type other than text or a form. So these two need no type if they have no body.
fn check_type(method: &Method, request: &HeaderMap) -> ApiResult<()> {
    if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(());
    }
    let has_body = request.contains_key(header::TRANSFER_ENCODING)
        || request.get(header::CONTENT_LENGTH).is_some_and(|n| n.as_bytes() != b"0");
    if *method != Method::POST && !has_body {
        return Ok(());
    }
    let mut types = request.get_all(header::CONTENT_TYPE).iter();
    let (first, second) = (types.next(), types.next());
    let essence = first.map(|v| v.as_bytes().split(|b| *b == b';').next().unwrap_or_default().trim_ascii());
    let known = |essence: &[u8]| {
        [headers::JSON, headers::LEDGER, headers::CHUNK]
            .iter()
            .any(|t| essence.eq_ignore_ascii_case(t.as_bytes()))
    };
    if second.is_none() && essence.is_some_and(known) {
        return Ok(());
    }
    let sent = first.map_or_else(|| "no Content-Type".to_owned(), |v| format!("Content-Type {v:?}"));
    let hint = "send `Content-Type: application/json`; with a saved state or a ledger, \
        `application/vnd.fletch.ledger`";
    Err(ApiError::new(Code::UnsupportedType, format!("the {method} request has {sent}"), hint))
}

fn misdirected(detail: String) -> ApiError {
    let hint = "use 127.0.0.1 or localhost, or add the host to auth.hosts of the server's settings; without \
        tokens a server takes requests for these hosts only, so that no web page can send them";
    ApiError::new(Code::Misdirected, detail, hint)
}

fn cross_site(name: &HeaderName, value: &HeaderValue) -> ApiError {
    let detail = format!("a web page of another site sent the request: it has {name} {value:?}");
    let hint = "use a program instead of a web page; if the page is yours, serve it under the server's own \
        host and port, or add its host to auth.hosts";
    ApiError::new(Code::CrossSite, detail, hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    const UNIX: Peer = Peer::Unix { uid: 7, gid: 7 };

    /// Checks a request line and headers. Returns the code of the refusal.
    fn ask(peer: Peer, needs_token: bool, line: &str, headers: &[(&str, &str)]) -> Option<Code> {
        ask_over((peer, false), needs_token, line, headers)
    }

    fn ask_over(
        (peer, tls): (Peer, bool),
        needs_token: bool,
        line: &str,
        headers: &[(&str, &str)],
    ) -> Option<Code> {
        let (method, uri) = line.split_once(' ').expect("line");
        let mut request = Request::builder().method(method).uri(uri);
        for (n, v) in headers {
            request = request.header(*n, *v);
        }
        let (head, ()) = request.body(()).expect("request").into_parts();
        let hosts: AllowedHosts = "cache.example:7380".parse().expect("hosts");
        BrowserRules { hosts: &hosts, needs_token, tls }.check(peer, &head).err().map(|e| e.code())
    }

    fn tcp(line: &str, headers: &[(&str, &str)]) -> Option<Code> {
        ask(Peer::Tcp, false, line, headers)
    }

    #[test]
    fn without_tokens_a_request_names_this_server() {
        let host = |h: &'static str| tcp("GET /v1/datasets", &[("host", h)]);
        assert_eq!(
            (host("127.0.0.1:7380"), host("localhost:1"), host("cache.example:7380")),
            (None, None, None)
        );
        for foreign in ["evil.example:7380", "", "cache.example"] {
            assert_eq!(host(foreign), Some(Code::Misdirected), "{foreign}");
        }
        assert_eq!(tcp("GET /v1/datasets", &[]), Some(Code::Misdirected), "no host");
        let two = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(tcp("GET /v1/datasets", &two), Some(Code::Misdirected));
        let local = [("host", "localhost")];
        assert_eq!(tcp("GET http://evil.example/v1/datasets", &local), Some(Code::Misdirected));
        assert_eq!(tcp("GET http://localhost/v1/datasets", &local), None);
        assert_eq!(tcp("GET /livez", &[("host", "10.0.0.7:7380")]), None, "a probe");
        let foreign = [("host", "evil.example")];
        assert_eq!(ask(UNIX, false, "GET /v1/datasets", &foreign), None, "a browser opens no unix socket");
        assert_eq!(ask(Peer::Tcp, true, "GET /v1/datasets", &foreign), None, "a page has no token");
    }

    #[test]
    fn requests_of_foreign_pages_are_refused_everywhere() {
        let foreign = [
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", ""),
            ("origin", "http://127.0.0.1:8888"),
            ("origin", "http://cache.example"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ];
        for (name, value) in foreign {
            for (peer, needs_token) in [(Peer::Tcp, false), (Peer::Tcp, true), (UNIX, false)] {
                let headers = [("host", "127.0.0.1:7380"), (name, value)];
                assert_eq!(
                    ask(peer, needs_token, "GET /", &headers),
                    Some(Code::CrossSite),
                    "{name} {value}"
                );
            }
        }
        let own = [
            ("origin", "http://127.0.0.1:7380"),
            ("origin", "https://cache.example:7380"),
            ("sec-fetch-site", "same-origin"),
            ("sec-fetch-site", "none"),
        ];
        for (name, value) in own {
            assert_eq!(tcp("GET /", &[("host", "127.0.0.1:7380"), (name, value)]), None, "{name} {value}");
        }
    }

    #[test]
    fn over_tls_a_page_of_this_server_is_a_secure_one() {
        let origin = |origin: &'static str| {
            let headers = [("host", "127.0.0.1:7380"), ("origin", origin)];
            ask_over((Peer::Tcp, true), false, "GET /", &headers)
        };
        assert_eq!(origin("https://127.0.0.1:7380"), None);
        assert_eq!(origin("http://127.0.0.1:7380"), Some(Code::CrossSite), "another program's page");
        assert_eq!(origin("http://cache.example:7380"), None, "named in auth.hosts");
        let hosts: AllowedHosts = "cache.example:443".parse().expect("hosts");
        let (head, ()) = Request::get("/")
            .header("host", "cache.example")
            .header("origin", "https://cache.example")
            .body(())
            .expect("request")
            .into_parts();
        let rules = |tls| BrowserRules { hosts: &hosts, needs_token: false, tls }.check(Peer::Tcp, &head);
        assert!(rules(true).is_ok(), "443 is the port of https");
        assert!(rules(false).is_err());
    }

    #[test]
    fn a_change_has_a_type_that_no_form_can_send() {
        let send = |line: &str, kind: &[&str], length: &str| {
            let mut headers = vec![("host", "localhost"), ("content-length", length)];
            headers.extend(kind.iter().map(|k| ("content-type", *k)));
            tcp(line, &headers)
        };
        let refused = Some(Code::UnsupportedType);
        let simple =
            ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""];
        for kind in simple.into_iter().chain(["text/plain; x=application/json", "application/jsonx"]) {
            for line in ["POST /v1/datasets", "PUT /v1/jobs/x/world", "DELETE /v1/datasets/d"] {
                assert_eq!(send(line, &[kind], "2"), refused, "{line} {kind}");
            }
        }
        assert_eq!(send("POST /v1/datasets", &[], "2"), refused);
        assert_eq!(send("POST /v1/datasets", &[], "0"), refused, "without a body, too");
        assert_eq!(send("POST /v1/datasets", &["application/json", "text/plain"], "2"), refused);
        assert_eq!(
            tcp("PUT /v1/jobs/x/world", &[("host", "localhost"), ("transfer-encoding", "chunked")]),
            refused
        );
        assert_eq!(send("DELETE /v1/datasets/d", &[], "0"), None, "a browser asks first");
        for kind in ["application/json", "Application/JSON ; charset=utf-8", headers::LEDGER] {
            assert_eq!(send("POST /v1/datasets", &[kind], "2"), None, "{kind}");
        }
    }
}
