//! The section `[cluster]`: its values, checked together.

use super::build::ConfigBuilder;
use crate::cluster::{ClusterConfig, EtcdConfig, PeerConfig, is_safe};
use fletch_client::TlsOptions;
use fletch_core::MemberId;
use fletch_settings::Span;
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use url::Url;

/// The most endpoints of etcd.
const ENDPOINTS_MAX: usize = 16;
/// The bounds of `cluster.member_ttl`. etcd keeps no shorter lease.
const TTL: std::ops::RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(60);
/// Settings that only etcd uses, and that have no default.
const OF_ETCD: [&str; 13] = [
    "cluster.endpoints",
    "cluster.advertise_url",
    "cluster.peer_url",
    "cluster.zone",
    "cluster.user",
    "cluster.password_file",
    "cluster.ca_file",
    "cluster.cert_file",
    "cluster.key_file",
    "cluster.peer_token_file",
    "cluster.peer_ca_file",
    "cluster.peer_cert_file",
    "cluster.peer_key_file",
];

impl ConfigBuilder<'_> {
    pub(super) fn cluster(&mut self, listen: Option<SocketAddr>) -> ClusterConfig {
        let id = self.get("cluster.id", MemberId::default_member());
        let etcd = match self.text("cluster.coordinator") {
            "embedded" => {
                self.check_embedded();
                None
            }
            "etcd" => Some(self.etcd(listen)),
            other => {
                let why = format!("{other:?} is no coordinator; write embedded or etcd");
                self.fault("cluster.coordinator", why);
                None
            }
        };
        ClusterConfig { id, etcd }
    }

    /// Checks that nothing is set which would have no effect.
    fn check_embedded(&mut self) {
        for key in OF_ETCD {
            if !self.text(key).is_empty() {
                self.fault(
                    key,
                    "has no effect with cluster.coordinator = embedded; set it to etcd, or unset this",
                );
            }
        }
    }

    fn etcd(&mut self, listen: Option<SocketAddr>) -> EtcdConfig {
        let cluster = self.text("cluster.name").to_owned();
        if let Err(e) = MemberId::new(&cluster) {
            self.fault("cluster.name", e.to_string().replacen("member", "cluster", 1));
        }
        let endpoints = self.endpoints();
        let advertise_url = self.url("cluster.advertise_url");
        self.check_reachable(listen, advertise_url.is_some());
        let zone = self.optional_text("cluster.zone");
        if let Some(Err(e)) = zone.as_deref().map(MemberId::new) {
            self.fault("cluster.zone", e.to_string().replacen("member", "zone", 1));
        }
        let weight = match self.text("cluster.weight") {
            "auto" => None,
            _ => Some(self.get("cluster.weight", 0)),
        };
        let member_ttl = self.span("cluster.member_ttl");
        if !TTL.contains(&member_ttl) {
            self.fault("cluster.member_ttl", "must be within 2s and 1m");
        }
        let forget_after = self.span("cluster.forget_after");
        if forget_after < Duration::from_secs(1) || forget_after > Duration::from_secs(86_400) {
            self.fault("cluster.forget_after", "must be within 1s and 1day");
        }
        let stale_max = match self.text("cluster.stale_max") {
            "off" => None,
            _ => Some(self.get("cluster.stale_max", Span(Duration::ZERO)).0),
        };
        if stale_max.is_some_and(|max| max < member_ttl) {
            self.fault("cluster.stale_max", "must be at least cluster.member_ttl, or `off`");
        }
        let user = self.pair("cluster.user", "cluster.password_file");
        let user = user.map(|(user, file)| (user, PathBuf::from(file)));
        let identity = self.pair("cluster.cert_file", "cluster.key_file");
        let identity = identity.map(|(cert, key)| (PathBuf::from(cert), PathBuf::from(key)));
        let ca_file = self.optional_path("cluster.ca_file");
        for (key, is_set) in
            [("cluster.ca_file", ca_file.is_some()), ("cluster.cert_file", identity.is_some())]
        {
            if is_set && endpoints.iter().any(|e| e.scheme() != "https") {
                self.fault(key, "needs https:// endpoints; change cluster.endpoints, or unset this");
            }
        }
        let peer_url = self.url("cluster.peer_url");
        let shown = self.pair("cluster.peer_cert_file", "cluster.peer_key_file");
        let (cert_file, key_file) = shown.map(|(cert, key)| (cert.into(), key.into())).unzip();
        let peers = PeerConfig {
            token_file: self.optional_path("cluster.peer_token_file"),
            allows_insecure: self.get("cluster.insecure_peers", false),
            tls: TlsOptions { ca_file: self.optional_path("cluster.peer_ca_file"), cert_file, key_file },
        };
        let own = peer_url.as_ref().or(advertise_url.as_ref()).cloned();
        let own = own.or_else(|| listen.map(|l| format!("{}://{l}", self.scheme())));
        self.check_peers(&peers, own.as_deref());
        EtcdConfig {
            cluster,
            endpoints,
            advertise_url,
            peer_url,
            zone,
            weight,
            member_ttl,
            forget_after,
            stale_max,
            user,
            ca_file,
            identity,
            peers,
            needs_token: !self.text("auth.tokens").is_empty(),
        }
    }

    /// Returns how this server is spoken to over TCP.
    fn scheme(&self) -> &'static str {
        if self.text("tls.cert_file").is_empty() { "http" } else { "https" }
    }

    /// Checks what the members of the cluster send each other. Every server has about the same settings. So
    /// what this one requires of clients, the others require of it. `own`: the URL that they use.
    fn check_peers(&mut self, peers: &PeerConfig, own: Option<&str>) {
        if peers.tls.cert_file.is_none() && !self.text("tls.client_ca_file").is_empty() {
            let why = "is needed with tls.client_ca_file, because every server asks the others for a \
                       certificate; give one that this CA signed for clients";
            self.fault("cluster.peer_cert_file", why);
        }
        if self.scheme() == "https" && own.is_some_and(|url| url.starts_with("http:")) {
            let why = "is plain HTTP, but this server speaks TLS (tls.cert_file); write https://";
            let is_peer_url = !self.text("cluster.peer_url").is_empty();
            self.fault(if is_peer_url { "cluster.peer_url" } else { "cluster.advertise_url" }, why);
        }
        if peers.token_file.is_none() && self.has_tokens() {
            let why = "is needed with auth.tokens, because every server asks the others for a token; make \
                       one with `fletch-server token new --role peer`";
            self.fault("cluster.peer_token_file", why);
        }
        if peers.token_file.is_some() && !peers.allows_insecure && own.is_some_and(|url| !is_safe(url)) {
            let url = own.unwrap_or_default();
            self.fault(
                "cluster.peer_token_file",
                format!(
                    "the other servers would send their token to {url} in plain text; give cluster.peer_url \
                     an https:// URL, or set cluster.insecure_peers = true on a network that you trust"
                ),
            );
        }
    }

    fn endpoints(&mut self) -> Vec<Url> {
        let key = "cluster.endpoints";
        let text = self.text(key).to_owned();
        let mut endpoints = Vec::new();
        for item in text.split(',').map(str::trim).filter(|e| !e.is_empty()) {
            match plain_url(item) {
                Some(url) => endpoints.push(url),
                None => self.fault(
                    key,
                    format!("{item:?} is no endpoint; write http://HOST:2379 or https://HOST:2379"),
                ),
            }
        }
        if endpoints.is_empty() && text.is_empty() {
            self.fault(key, "is needed with cluster.coordinator = etcd; name every member of etcd");
        }
        if endpoints.len() > ENDPOINTS_MAX {
            self.fault(key, format!("has more than {ENDPOINTS_MAX} endpoints; name fewer"));
        }
        endpoints
    }

    /// Checks that the other members of the cluster can know where this server is.
    fn check_reachable(&mut self, listen: Option<SocketAddr>, is_advertised: bool) {
        if self.text("listen") == "none" {
            self.fault("listen", "a server of a cluster needs a TCP address; give IP:PORT");
        } else if listen.is_some_and(|l| l.ip().is_unspecified()) && !is_advertised {
            self.fault(
                "cluster.advertise_url",
                "is needed, because `listen` names every address; give http://HOST:PORT, by which clients \
                 reach this server",
            );
        }
    }

    fn optional_text(&self, key: &str) -> Option<String> {
        Some(self.text(key).to_owned()).filter(|t| !t.is_empty())
    }

    fn url(&mut self, key: &str) -> Option<String> {
        let text = self.optional_text(key)?;
        if plain_url(&text).is_none() {
            self.fault(key, format!("{text:?} is no URL of a server; write http://HOST:PORT"));
        }
        Some(text.trim_end_matches('/').to_owned())
    }

    /// Returns two settings of which none works without the other.
    fn pair(&mut self, first: &str, second: &str) -> Option<(String, String)> {
        match (self.optional_text(first), self.optional_text(second)) {
            (Some(a), Some(b)) => Some((a, b)),
            (None, None) => None,
            (Some(_), None) => {
                self.fault(first, format!("needs {second}, too"));
                None
            }
            (None, Some(_)) => {
                self.fault(second, format!("needs {first}, too"));
                None
            }
        }
    }
}

/// Returns a URL of scheme, host and port, and nothing else.
fn plain_url(text: &str) -> Option<Url> {
    let url = Url::parse(text).ok()?;
    let has_more = url.query().is_some() || url.fragment().is_some() || url.path() != "/";
    let has_user = !url.username().is_empty() || url.password().is_some();
    let is_plain = matches!(url.scheme(), "http" | "https") && url.has_host() && !has_more && !has_user;
    is_plain.then_some(url)
}
