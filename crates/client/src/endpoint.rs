//! The address of a server: `http://host:port`, `https://host:port` or `unix:PATH`; and lists of URLs.

use std::{fmt, path::PathBuf, str::FromStr};
use url::{Host, Url};

/// The longest path of a unix socket (`sun_path` less its closing NUL), in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A URL, reached over TCP.
    Http(Url),
    /// The path of a unix socket on this machine.
    Unix(PathBuf),
}

/// The error for a text that is not the address of a server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("server {text:?}: {why}")]
pub struct BadEndpoint {
    /// The text.
    pub text: String,
    /// Why it is not an address.
    pub why: String,
}

impl Endpoint {
    /// Returns whether the address is a unix socket, and therefore on this machine.
    #[must_use]
    pub fn is_unix(&self) -> bool {
        matches!(self, Endpoint::Unix(_))
    }

    /// Returns whether the address can only be of this machine: a unix socket, or a loopback address.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Endpoint::Unix(_) => true,
            Endpoint::Http(url) => match url.host() {
                Some(Host::Ipv4(ip)) => ip.is_loopback(),
                Some(Host::Ipv6(ip)) => ip.is_loopback(),
                Some(Host::Domain(name)) => name.eq_ignore_ascii_case("localhost"),
                None => false,
            },
        }
    }

    /// Returns whether the server is asked over TLS.
    #[must_use]
    pub fn is_https(&self) -> bool {
        matches!(self, Endpoint::Http(url) if url.scheme() == "https")
    }

    /// Returns whether others in the network can read what is sent: plain HTTP to another machine.
    #[must_use]
    pub fn is_exposed(&self) -> bool {
        !self.is_local() && !self.is_https()
    }

    /// Returns the host of the URL, if it is a name and no address.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Endpoint::Http(url) => url.domain(),
            Endpoint::Unix(_) => None,
        }
    }

    /// Returns the URL to which the paths of routes are appended.
    pub(crate) fn base(&self) -> String {
        match self {
            Endpoint::Http(url) => url.as_str().trim_end_matches('/').to_owned(),
            Endpoint::Unix(_) => "http://localhost".to_owned(),
        }
    }
}

impl FromStr for Endpoint {
    type Err = BadEndpoint;

    fn from_str(s: &str) -> Result<Self, BadEndpoint> {
        let bad = |why: &str| BadEndpoint { text: s.to_owned(), why: why.to_owned() };
        if let Some(path) = s.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(bad("unix: must be followed by the path of a socket"));
            }
            if path.len() > SOCKET_PATH_BYTES_MAX {
                return Err(bad("the path of a unix socket must not be longer than 107 bytes"));
            }
            return Ok(Endpoint::Unix(path.into()));
        }
        let url = Url::parse(s)
            .map_err(|e| bad(&format!("{e}; expected http://host:port, https://host:port or unix:PATH")))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(bad("expected http://host:port, https://host:port or unix:PATH"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(bad("the URL must not contain a user or password; use a token"));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(bad("the URL must not contain a query or a fragment"));
        }
        Ok(Endpoint::Http(url))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Http(_) => f.write_str(&self.base()),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The servers that a user names: one address, or several URLs in the order of preference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Servers {
    first: Endpoint,
    more: Vec<Endpoint>,
}

impl Servers {
    /// Returns the addresses, the preferred one first.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        std::iter::once(&self.first).chain(&self.more)
    }

    /// Returns the preferred address.
    #[must_use]
    pub fn first(&self) -> &Endpoint {
        &self.first
    }

    /// Returns whether there are several addresses.
    #[must_use]
    pub fn is_list(&self) -> bool {
        !self.more.is_empty()
    }

    /// Returns whether the server is reached by a unix socket.
    #[must_use]
    pub fn is_unix(&self) -> bool {
        self.first.is_unix()
    }

    /// Returns whether all addresses can only be of this machine.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.iter().all(Endpoint::is_local)
    }
}

impl From<Endpoint> for Servers {
    fn from(first: Endpoint) -> Self {
        Servers { first, more: Vec::new() }
    }
}

impl FromStr for Servers {
    type Err = BadEndpoint;

    fn from_str(s: &str) -> Result<Self, BadEndpoint> {
        let bad = |why: &str| BadEndpoint { text: s.to_owned(), why: why.to_owned() };
        let next_is_url = |(comma, _): (usize, &str)| {
            let rest = s[comma + 1..].trim_start();
            ["http:", "https:", "unix:"].iter().any(|scheme| rest.starts_with(scheme))
        };
        // The path of a socket may contain a comma.
        if s.starts_with("unix:") && !s.match_indices(',').any(next_is_url) {
            return s.parse().map(|endpoint: Endpoint| endpoint.into());
        }
        let all: Vec<Endpoint> = s.split(',').map(|part| part.trim().parse()).collect::<Result<_, _>>()?;
        if all.len() > 1 && all.iter().any(Endpoint::is_unix) {
            return Err(bad("a unix socket stands alone; a list has only URLs: http://A:7380,http://B:7380"));
        }
        let mut all = all.into_iter();
        let first = all.next().ok_or_else(|| bad("no address"))?;
        let mut servers = Servers::from(first);
        for endpoint in all {
            if !servers.iter().any(|known| *known == endpoint) {
                servers.more.push(endpoint);
            }
        }
        Ok(servers)
    }
}

impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.first.fmt(f)?;
        self.more.iter().try_for_each(|endpoint| write!(f, ",{endpoint}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_only_urls() {
        let shown = |text: &str| text.parse::<Servers>().expect(text).to_string();
        assert_eq!(shown("http://a:1, http://b:2/,http://a:1"), "http://a:1,http://b:2");
        assert_eq!(shown("unix:/run/a,b"), "unix:/run/a,b");
        assert_eq!(shown("https://a"), "https://a");
        let list: Servers = "http://127.0.0.1:1,http://b:2".parse().expect("a list");
        assert!(list.is_list() && !list.is_local() && !list.is_unix());
        assert_eq!(list.first().to_string(), "http://127.0.0.1:1");
        for bad in ["", ",", "http://a,", "http://a,unix:/x", "unix:/x,http://a", "http://a,b:1"] {
            assert!(bad.parse::<Servers>().is_err(), "{bad}");
        }
    }

    #[test]
    fn loopback_addresses_and_sockets_are_local() {
        for (text, local) in [
            ("http://127.0.0.1:7380", true),
            ("http://[::1]:7380", true),
            ("http://localhost:7380", true),
            ("unix:/run/x", true),
            ("http://10.0.0.7:7380", false),
            ("https://fletch.example", false),
        ] {
            let endpoint: Endpoint = text.parse().expect(text);
            assert_eq!(endpoint.is_local(), local, "{text}");
            assert_eq!(endpoint.is_exposed(), text == "http://10.0.0.7:7380", "{text}");
        }
    }

    #[test]
    fn addresses_are_parsed_and_bad_ones_rejected() {
        let ok = [
            ("http://127.0.0.1:7380", "http://127.0.0.1:7380"),
            ("https://fletch.example/base/", "https://fletch.example/base"),
            ("unix:/run/fletch/server.sock", "unix:/run/fletch/server.sock"),
            ("unix:///run/x", "unix:/run/x"),
        ];
        for (text, shown) in ok {
            assert_eq!(text.parse::<Endpoint>().expect(text).to_string(), shown);
        }
        let long = format!("unix:/{}", "x".repeat(107));
        for bad in ["", "127.0.0.1:7380", "ftp://x", "unix:", &long, "http://u:p@h", "http://h/?q", "h"] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }
}
