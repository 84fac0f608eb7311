//! The settings that the servers of a cluster should have in common, as short hashes.

use super::Config;
use fletch_core::Hash;
use std::collections::BTreeMap;

/// The hexadecimal digits of a hash that are shown. They tell settings apart, and say nothing else of them.
const DIGITS: usize = 12;

/// The keys and sections of settings that may differ: places, addresses, sizes of this machine, and logs.
const OWN: &[&str] = &[
    "listen",
    "socket",
    "idle",
    "cache.dir",
    "cache.size",
    "cache.free_floor",
    "cache.short_circuit",
    "state.dir",
    "auth.",
    "tls.",
    "s3.listen",
    "s3.key_file",
    "memory.",
    "tables.",
    "log.",
    "trace.",
    "dashboard.",
    "cluster.id",
    "cluster.endpoints",
    "cluster.advertise_url",
    "cluster.peer_url",
    "cluster.zone",
    "cluster.weight",
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

/// Returns the first digits of a hash, which tell settings apart.
#[must_use]
pub fn short_hash(hash: &Hash) -> String {
    hash.to_string()[..DIGITS].to_owned()
}

impl Config {
    /// Returns a short hash of each setting that should be the same on all servers of a cluster, and of the
    /// origins.
    #[must_use]
    pub fn shared(&self) -> BTreeMap<String, String> {
        let of = |text: &str| short_hash(&Hash::of(text.as_bytes()));
        let is_own =
            |key: &str| OWN.iter().any(|own| key == *own || own.ends_with('.') && key.starts_with(own));
        let shared = self.effective.iter().filter(|setting| !is_own(setting.key));
        let mut all: BTreeMap<String, String> =
            shared.map(|setting| (setting.key.to_owned(), of(&setting.value))).collect();
        let mut origins: Vec<String> = self.origins.iter().map(|origin| format!("{origin:?}")).collect();
        origins.sort_unstable();
        all.insert("origins".to_owned(), of(&origins.join("\n")));
        all
    }
}
