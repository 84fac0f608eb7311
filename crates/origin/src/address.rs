//! Decides to which addresses a client of origins may connect.
//!
//! A name is resolved here and its addresses are checked here; the client then connects to these addresses
//! and to no others. So a name that resolves to another address a moment later gains nothing (DNS
//! rebinding). The connector checks a host that is an address itself, because the client resolves only names.
//!
//! Loopback and private addresses are allowed: an administrator configured the origin. Sources: RFC 1122
//! (`0.0.0.0/8`), RFC 3927 and RFC 4291 (link-local), RFC 4291, RFC 6052 and RFC 3056 (IPv4 in IPv6), and
//! the clouds' own documents for their metadata services.

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// The kinds of addresses that a client of origins does not connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressClass {
    /// `0.0.0.0/8` and `::`. Linux connects to `0.0.0.0` as to itself.
    Unspecified,
    /// Multicast and broadcast.
    Multicast,
    /// `169.254.0.0/16` and `fe80::/10`. Most clouds have their metadata services there.
    LinkLocal,
    /// A metadata service of a cloud outside the link-local ranges.
    Metadata,
}

impl AddressClass {
    /// Returns the class in words.
    pub fn name(self) -> &'static str {
        match self {
            AddressClass::Unspecified => "an unspecified address",
            AddressClass::Multicast => "a multicast address",
            AddressClass::LinkLocal => "a link-local address",
            AddressClass::Metadata => "the address of a cloud's metadata service",
        }
    }
}

/// Metadata services outside the link-local ranges: Azure's platform address, Alibaba, Oracle.
const METADATA_V4: [Ipv4Addr; 3] =
    [Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(192, 0, 0, 192)];

/// Metadata services with unique local addresses: AWS and Google.
const METADATA_V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254), Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)];

/// An address that a client of origins does not connect to. Travels as the source of a client's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub(crate) struct RefusedAddress {
    pub address: IpAddr,
    pub class: AddressClass,
}

impl RefusedAddress {
    fn text(&self) -> String {
        let found = format!("its server has the address {}, {}", self.address, self.class.name());
        match self.class {
            AddressClass::Unspecified | AddressClass::Multicast => {
                format!("{found}, to which Fletch does not connect; configure the server's own address")
            }
            AddressClass::LinkLocal | AddressClass::Metadata => format!(
                "{found}, to which Fletch does not connect; if the data is there, set allow_link_local = \
                 true in the settings of this origin"
            ),
        }
    }
}

/// Which addresses a client may connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddressRule {
    /// Whether link-local addresses and metadata services are allowed.
    pub allow_link_local: bool,
}

impl AddressRule {
    /// Checks one address.
    pub fn check(self, address: IpAddr) -> Result<(), RefusedAddress> {
        match class(address) {
            None => Ok(()),
            Some(AddressClass::LinkLocal | AddressClass::Metadata) if self.allow_link_local => Ok(()),
            Some(class) => Err(RefusedAddress { address, class }),
        }
    }

    /// Checks the host of a URL, if the host is an address and not a name.
    ///
    /// The parser of URLs has already turned decimal, octal and hexadecimal forms into addresses.
    pub fn check_host(self, url: &url::Url) -> Result<(), RefusedAddress> {
        match url.host() {
            Some(url::Host::Ipv4(v4)) => self.check(v4.into()),
            Some(url::Host::Ipv6(v6)) => self.check(v6.into()),
            Some(url::Host::Domain(_)) | None => Ok(()),
        }
    }

    /// Returns the allowed addresses of a name. Fails if the name has refused addresses only.
    fn allowed(self, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, RefusedAddress> {
        let mut refused = None;
        let mut allowed = Vec::with_capacity(addresses.len());
        for address in addresses {
            match self.check(address.ip()) {
                Ok(()) => allowed.push(address),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if allowed.is_empty() => Err(error),
            _ => Ok(allowed),
        }
    }
}

/// Returns the class of an address, or `None` if a client may connect to it.
fn class(address: IpAddr) -> Option<AddressClass> {
    match address {
        IpAddr::V4(v4) => class_v4(v4),
        IpAddr::V6(v6) => class_v6(v6),
    }
}

fn class_v4(v4: Ipv4Addr) -> Option<AddressClass> {
    if v4.octets()[0] == 0 {
        Some(AddressClass::Unspecified)
    } else if v4.is_multicast() || v4.is_broadcast() {
        Some(AddressClass::Multicast)
    } else if v4.is_link_local() {
        Some(AddressClass::LinkLocal)
    } else {
        METADATA_V4.contains(&v4).then_some(AddressClass::Metadata)
    }
}

fn class_v6(v6: Ipv6Addr) -> Option<AddressClass> {
    if v6.is_loopback() {
        return None;
    }
    if v6.is_unspecified() {
        return Some(AddressClass::Unspecified);
    }
    if v6.is_multicast() {
        return Some(AddressClass::Multicast);
    }
    if v6.is_unicast_link_local() {
        return Some(AddressClass::LinkLocal);
    }
    if METADATA_V6.contains(&v6) {
        return Some(AddressClass::Metadata);
    }
    class_v4(embedded_v4(v6)?)
}

/// Returns the IPv4 address to which a gateway or the kernel may send what goes to `v6`.
fn embedded_v4(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = v6.segments();
    let of = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Some(Ipv4Addr::new(a, b, c, d))
    };
    match s {
        // Mapped (::ffff:0:0/96) and the older compatible (::/96) and translated (::ffff:0:0:0/96) forms.
        [0, 0, 0, 0, 0, 0xffff | 0, high, low] | [0, 0, 0, 0, 0xffff, 0, high, low] => of(high, low),
        // NAT64 (64:ff9b::/96).
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => of(high, low),
        // 6to4 (2002::/16).
        [0x2002, high, low, ..] => of(high, low),
        _ => None,
    }
}

/// Resolves names and returns only allowed addresses.
pub(crate) struct CheckedResolver {
    pub inner: Arc<dyn Resolve>,
    pub rule: AddressRule,
}

impl Resolve for CheckedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (found, rule) = (self.inner.resolve(name), self.rule);
        Box::pin(async move {
            let allowed = rule.allowed(found.await?.collect())?;
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

/// A name without an address. Travels as the source of a client's error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the name {host} of the server does not resolve: {why}; check the endpoint, the region and the network"
)]
struct UnresolvedName {
    host: String,
    why: String,
}

/// Resolves names as the operating system does.
pub(crate) struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            // Port 0: the client puts the port of the URL in its place.
            let found = tokio::net::lookup_host((name.as_str(), 0)).await;
            let found =
                found.map_err(|e| UnresolvedName { host: name.as_str().to_owned(), why: e.to_string() });
            let found: Vec<SocketAddr> = found?.collect();
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests;
