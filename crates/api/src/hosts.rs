//! The hosts by which a request may name a program of this machine.
//!
//! A server without tokens and the metrics page of a mount serve every process of their machine, so a web
//! page must not reach them. A page can make its own name lead to a loopback address (DNS rebinding). Its
//! requests then name that host.

use http::uri::Authority;
use std::{fmt, net::IpAddr, str::FromStr};

/// A host and perhaps a port, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostPort {
    host: String,
    port: Option<u16>,
}

impl HostPort {
    fn parse(text: &str) -> Option<Self> {
        let authority: Authority = text.parse().ok().filter(|_| !text.contains('@'))?;
        let port = authority.port_u16();
        // "host:" and a port past 65535 parse as an authority without a port.
        if port.is_none() && authority.as_str().len() != authority.host().len() {
            return None;
        }
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        (!host.is_empty()).then_some(HostPort { host, port })
    }

    /// Returns whether only this machine can have the host's name.
    fn is_loopback(&self) -> bool {
        let ip = self.host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        self.host == "localhost" || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
    }
}

/// The hosts by which a request may name a server without tokens: loopback, and those of `auth.hosts`.
///
/// Any port of loopback is right: a forwarded port (`ssh -L`) is another one, and no page can have such a
/// host as its own name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedHosts(Vec<HostPort>);

impl AllowedHosts {
    /// Returns whether the `Host` of a request, or its authority, names this server.
    ///
    /// Without a port, the host has the port of `scheme`, `http` or `https`.
    #[must_use]
    pub fn allows(&self, authority: &str, scheme: &str) -> bool {
        let asked = HostPort::parse(authority);
        asked.is_some_and(|asked| asked.is_loopback() || self.lists(&asked, scheme))
    }

    /// Returns whether `auth.hosts` names a host. Without a port, the host has the port of `scheme`.
    #[must_use]
    pub fn names(&self, authority: &str, scheme: &str) -> bool {
        HostPort::parse(authority).is_some_and(|asked| self.lists(&asked, scheme))
    }

    fn lists(&self, asked: &HostPort, scheme: &str) -> bool {
        let port = asked.port.or(match scheme {
            "http" => Some(80),
            "https" => Some(443),
            _ => None,
        });
        self.0.iter().any(|h| h.host == asked.host && (h.port.is_none() || h.port == port))
    }
}

impl FromStr for AllowedHosts {
    type Err = String;

    /// Parses `cache.example:7380,gpu7`: hosts, each with its port or for every port, separated by commas.
    fn from_str(s: &str) -> Result<Self, String> {
        let host = |part: &str| {
            HostPort::parse(part.trim()).ok_or_else(|| {
                format!("{part:?} is not a host; write a name or an address, such as gpu7 or gpu7:7380")
            })
        };
        let parts = s.split(',').filter(|p| !p.trim().is_empty());
        parts.map(host).collect::<Result<_, String>>().map(AllowedHosts)
    }
}

impl fmt::Display for AllowedHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |h: &HostPort| match h.port {
            Some(port) => format!("{}:{port}", h.host),
            None => h.host.clone(),
        };
        f.write_str(&self.0.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_the_named_hosts_are_allowed() {
        let none = AllowedHosts::default();
        let own =
            ["localhost", "LocalHost:7380", "localhost.:1", "127.0.0.1:7380", "127.9.9.9", "[::1]:7380"];
        for host in own.into_iter().chain(["[::1]", "[::ffff:127.0.0.1]:1"]) {
            assert!(none.allows(host, "http") && !none.names(host, "http"), "{host}");
        }
        let foreign = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7380", "10.0.0.1"];
        let odd =
            ["", ":7380", "127.0.0.1:", "localhost:99999", "a@localhost", "localhost,evil", "2130706433"];
        for host in foreign.into_iter().chain(odd) {
            assert!(!none.allows(host, "http"), "{host}");
        }
        let named: AllowedHosts = "gpu7, Cache.Example:8080".parse().expect("hosts");
        for host in ["gpu7", "GPU7:1", "cache.example:8080"] {
            assert!(named.allows(host, "http") && named.names(host, "http"), "{host}");
        }
        for host in ["gpu70", "cache.example", "cache.example:80", "x.gpu7"] {
            assert!(!named.allows(host, "http"), "{host}");
        }
        let default_port: AllowedHosts = "cache.example:443".parse().expect("hosts");
        assert!(
            default_port.allows("cache.example", "https") && !default_port.allows("cache.example", "http")
        );
        assert_eq!(named.to_string(), "gpu7,cache.example:8080");
        for bad in ["http://gpu7", "a b", "u@h", "h:", "h:x"] {
            assert!(bad.parse::<AllowedHosts>().expect_err(bad).contains("not a host"), "{bad}");
        }
    }
}
