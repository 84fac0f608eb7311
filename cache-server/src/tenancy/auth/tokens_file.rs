//! The tokens file: the principals of tokens, and the quotas of tenants.
//!
//! ```toml
//! [[token]]
//! hash = "…"            # BLAKE3 of the token, 64 hex digits; the token itself is stored nowhere
//! tenant = "vision"
//! domain = "research"   # shares bytes with the tenants of this domain; default: the tenant alone
//! role = "user"         # reader | user | admin | monitor | peer; a peer has no tenant
//! note = "CI runner"    # for people
//!
//! [[tenant]]
//! name = "vision"
//! registered = "2TiB"   # content bytes of the datasets it registered
//! resident = "500GiB"   # bytes of its chunks on the disks of all servers
//! state = "4GiB"        # bytes of the records and ledgers of its jobs
//! jobs = 1000           # known jobs
//! declared_jobs = 100   # declared jobs
//! requests = 256        # running requests for bytes
//! origin_requests = 16  # chunks that are being read from origins
//! weight = 2.0          # its weight in the division of the disk; 1 by default
//! min_share = "100GiB"  # bytes of disk that the datasets of its running jobs get at least
//! ```

use super::Principal;
use constant_time_eq::constant_time_eq_32;
use fletch_api::allocation::check_weight;
use fletch_core::{Domain, Hash, Tenant};
use fletch_settings::{ByteSize, SettingsError};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    hash::{BuildHasher as _, RandomState},
    path::Path,
    str::FromStr,
};

const KEYS: &[&str] = &[
    "token.*.hash",
    "token.*.tenant",
    "token.*.domain",
    "token.*.role",
    "token.*.note",
    "tenant.*.name",
    "tenant.*.registered",
    "tenant.*.resident",
    "tenant.*.state",
    "tenant.*.jobs",
    "tenant.*.declared_jobs",
    "tenant.*.requests",
    "tenant.*.origin_requests",
    "tenant.*.weight",
    "tenant.*.min_share",
];

/// What a principal may do. No role, not even admin, may read another domain's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// May read the domain's datasets. Mounts and loaders need this.
    Reader,
    /// May also register, unregister, warm up and evict them.
    #[default]
    User,
    /// May also see the accounts and metrics of every tenant.
    Admin,
    /// May only see metrics. For a monitoring system.
    Monitor,
    /// May only ask for chunks as another server of the cluster, for any domain.
    Peer,
}

impl Role {
    /// Returns whether the role may read the domain's datasets.
    #[must_use]
    pub fn may_read(self) -> bool {
        matches!(self, Role::Reader | Role::User | Role::Admin)
    }

    /// Returns whether the role may use the routes for other servers of the cluster.
    #[must_use]
    pub fn may_ask_as_peer(self) -> bool {
        self == Role::Peer
    }

    /// Returns whether the role may change what the server does for the domain.
    #[must_use]
    pub fn may_write(self) -> bool {
        matches!(self, Role::User | Role::Admin)
    }

    /// Returns whether the role may see every tenant's accounts.
    #[must_use]
    pub fn may_see_all_tenants(self) -> bool {
        self == Role::Admin
    }

    /// Returns whether the role may see metrics, whose labels name every tenant.
    #[must_use]
    pub fn may_read_metrics(self) -> bool {
        matches!(self, Role::Admin | Role::Monitor)
    }

    fn word(self) -> &'static str {
        match self {
            Role::Reader => "reader",
            Role::User => "user",
            Role::Admin => "admin",
            Role::Monitor => "monitor",
            Role::Peer => "peer",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Role {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let all = [Role::Reader, Role::User, Role::Admin, Role::Monitor, Role::Peer];
        all.into_iter()
            .find(|r| r.word() == s)
            .ok_or_else(|| format!("{s:?} is not a role; write reader, user, admin, monitor or peer"))
    }
}

/// The bounds of a tenant. `None`: no bound of its own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Quota {
    /// Content bytes of the datasets that the tenant registered.
    pub registered: Option<u64>,
    /// Bytes that the chunks of those datasets occupy on this server's disk.
    pub resident: Option<u64>,
    /// Bytes of the records and ledgers of its jobs.
    pub state: Option<u64>,
    /// Known jobs.
    pub jobs: Option<u64>,
    /// Declared jobs.
    pub declared_jobs: Option<u64>,
    /// Running requests for bytes.
    pub requests: Option<u64>,
    /// Chunks that are being read from origins.
    pub origin_requests: Option<u64>,
    /// Its weight in the division of the disk, which its jobs divide among themselves.
    pub weight: Option<f64>,
    /// Bytes of disk that the datasets of its running jobs get at least together.
    pub min_share: Option<u64>,
}

/// Why a tokens file is not used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TokensError {
    /// It cannot be read or parsed. The error has every fault with its line.
    #[error("tokens file: {0}")]
    Settings(#[from] SettingsError),
    /// It contradicts itself.
    #[error("tokens file {file}: {}", .faults.join("; "))]
    Faults {
        /// The file.
        file: String,
        /// All faults.
        faults: Vec<String>,
    },
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    token: Vec<TokenRow>,
    #[serde(default)]
    tenant: Vec<TenantRow>,
}

#[derive(Deserialize)]
struct TokenRow {
    hash: Hash,
    tenant: Option<Tenant>,
    domain: Option<Domain>,
    #[serde(default)]
    role: Role,
    #[serde(rename = "note")]
    _note: Option<String>,
}

impl TokenRow {
    /// Returns the principal of the token, or what is wrong.
    fn principal(&self) -> Result<Principal, String> {
        let short = self.hash.short();
        if self.role.may_ask_as_peer() {
            return match (&self.tenant, &self.domain) {
                (None, None) => Ok(Principal::anonymous(Role::Peer)),
                _ => Err(format!("the peer token {short}… has a tenant or a domain; remove them")),
            };
        }
        let Some(tenant) = self.tenant.clone() else {
            return Err(format!("the token {short}… has no tenant; add `tenant = \"NAME\"`"));
        };
        // Names of domains and tenants have the same grammar.
        let own = || Domain::new(tenant.as_str()).unwrap_or_else(|_| Domain::default_domain());
        let domain = self.domain.clone().unwrap_or_else(own);
        Ok(Principal { domain, tenant, role: self.role })
    }
}

#[derive(Deserialize)]
struct TenantRow {
    name: Tenant,
    registered: Option<ByteSize>,
    resident: Option<ByteSize>,
    state: Option<ByteSize>,
    jobs: Option<u64>,
    declared_jobs: Option<u64>,
    requests: Option<u64>,
    origin_requests: Option<u64>,
    weight: Option<f64>,
    min_share: Option<ByteSize>,
}

impl TenantRow {
    fn quota(&self) -> Quota {
        Quota {
            registered: self.registered.map(|b| b.0),
            resident: self.resident.map(|b| b.0),
            state: self.state.map(|b| b.0),
            jobs: self.jobs,
            declared_jobs: self.declared_jobs,
            requests: self.requests,
            origin_requests: self.origin_requests,
            weight: self.weight,
            min_share: self.min_share.map(|b| b.0),
        }
    }

    /// Returns the keys whose value is 0, which would shut the tenant out.
    fn zeros(&self) -> impl Iterator<Item = &'static str> {
        let counts = [
            ("jobs", self.jobs),
            ("declared_jobs", self.declared_jobs),
            ("requests", self.requests),
            ("origin_requests", self.origin_requests),
        ];
        counts.into_iter().filter(|(_, n)| *n == Some(0)).map(|(key, _)| key)
    }
}

/// A valid tokens file.
pub(super) struct Tokens {
    /// Principals, by a keyed hash of the token's hash, under a key of this process.
    ///
    /// So the bucket of a guess tells nothing, and inside a bucket each comparison takes the same time.
    by_hash: HashMap<u64, Vec<(Hash, Principal)>>,
    key: RandomState,
    /// Principals by the first eight bytes of a token's hash. `None` if several tokens have them.
    by_prefix: HashMap<u64, Option<Principal>>,
    quotas: BTreeMap<Tenant, Quota>,
    tenants: BTreeSet<Tenant>,
    len: usize,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("len", &self.len).field("quotas", &self.quotas).finish_non_exhaustive()
    }
}

impl Tokens {
    /// Reads and checks a tokens file.
    ///
    /// # Errors
    /// [`TokensError`].
    pub fn load(path: &Path) -> Result<Self, TokensError> {
        let file: File = fletch_settings::load(path, KEYS)?;
        Tokens::of(file).map_err(|faults| TokensError::Faults { file: path.display().to_string(), faults })
    }

    fn of(file: File) -> Result<Self, Vec<String>> {
        let mut faults = Vec::new();
        if file.token.is_empty() {
            // Most likely the file is being written. An empty file would reject every caller.
            faults.push("it has no [[token]]; make one with `fletch-server token new`".to_owned());
        }
        let mut tokens = Tokens {
            by_hash: HashMap::new(),
            key: RandomState::new(),
            by_prefix: HashMap::new(),
            quotas: BTreeMap::new(),
            tenants: BTreeSet::new(),
            len: 0,
        };
        let mut domains: BTreeMap<Tenant, Domain> = BTreeMap::new();
        for t in file.token {
            let principal = match t.principal() {
                Ok(principal) => principal,
                Err(why) => {
                    faults.push(why);
                    continue;
                }
            };
            // A peer is no tenant: it has no quota, and no tenant's part becomes smaller because of it.
            if !principal.role.may_ask_as_peer() {
                let Principal { domain, tenant, .. } = &principal;
                let of = domains.entry(tenant.clone()).or_insert_with(|| domain.clone());
                if of != domain {
                    faults.push(format!(
                        "tenant {tenant} is in the domains {of} and {domain}; a tenant is in one domain"
                    ));
                }
            }
            let slot = tokens.by_hash.entry(tokens.key.hash_one(t.hash.as_bytes())).or_default();
            if slot.iter().any(|(h, _)| *h == t.hash) {
                faults.push(format!("the hash {}… is listed twice", t.hash.short()));
            }
            let unique = Some(principal.clone());
            tokens.by_prefix.entry(prefix_of(&t.hash)).and_modify(|of| *of = None).or_insert(unique);
            slot.push((t.hash, principal));
            tokens.len += 1;
        }
        for t in file.tenant {
            if !domains.contains_key(&t.name) {
                faults.push(format!("[[tenant]] {} has no [[token]]", t.name));
            }
            if let Some(Err(why)) = t.weight.map(check_weight) {
                faults.push(format!("[[tenant]] {}: {why}", t.name));
            }
            for key in t.zeros() {
                let name = &t.name;
                faults.push(format!(
                    "[[tenant]] {name} has {key} = 0, which shuts it out; write at least 1, or remove its \
                     tokens"
                ));
            }
            if tokens.quotas.insert(t.name.clone(), t.quota()).is_some() {
                faults.push(format!("[[tenant]] {} is listed twice", t.name));
            }
        }
        tokens.tenants = domains.into_keys().collect();
        if faults.is_empty() { Ok(tokens) } else { Err(faults) }
    }

    /// Returns a hash of all tokens, their principals and their quotas, whatever their order in the file.
    pub fn fingerprint(&self) -> Hash {
        let tokens = self.by_hash.values().flatten();
        let mut lines: Vec<String> = tokens.map(|(hash, of)| format!("{hash} {of:?}")).collect();
        lines.sort_unstable();
        lines.push(format!("{:?}", self.quotas));
        Hash::of(lines.join("\n").as_bytes())
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the principal of a token.
    pub fn find(&self, token: &[u8]) -> Option<Principal> {
        let hash = Hash::of(token);
        let slot = self.by_hash.get(&self.key.hash_one(hash.as_bytes()))?;
        let mut found = None;
        for (known, principal) in slot {
            if constant_time_eq_32(known.as_bytes(), hash.as_bytes()) {
                found = Some(principal);
            }
        }
        found.cloned()
    }

    /// Returns the principal of the one token whose hash begins with these bytes.
    pub fn of_prefix(&self, prefix: u64) -> Option<Principal> {
        self.by_prefix.get(&prefix)?.clone()
    }

    /// Returns the quota of a tenant.
    pub fn quota(&self, tenant: &Tenant) -> Quota {
        self.quotas.get(tenant).copied().unwrap_or_default()
    }

    /// Returns every tenant that has a token, sorted by name, with its quota.
    pub fn tenants(&self) -> Vec<(Tenant, Quota)> {
        self.tenants.iter().map(|t| (t.clone(), self.quota(t))).collect()
    }

    /// Returns every tenant that has a quota, sorted by name.
    pub fn quotas(&self) -> Vec<(Tenant, Quota)> {
        self.quotas.iter().map(|(t, q)| (t.clone(), *q)).collect()
    }
}

/// Returns the first eight bytes of a token's hash, as a number whose hexadecimal digits are the hash's.
pub(super) fn prefix_of(hash: &Hash) -> u64 {
    hash.as_bytes()[..8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Tokens, String> {
        let file = fletch_settings::parse(text, "t.toml", KEYS).map_err(|e| e.to_string())?;
        Tokens::of(file).map_err(|f| f.join("; "))
    }

    fn hash(token: &str) -> Hash {
        Hash::of(token.as_bytes())
    }

    #[test]
    fn every_fault_is_named() {
        let (a, b) = (hash("a"), hash("b"));
        let cases = [
            ("", "token new"),
            ("[[token]]\nhash = \"00\"\ntenant = \"t\"", "t.toml:2"),
            (&format!("[[token]]\nhash = \"{a}\"\ntenant = \"t\"\nrole = \"root\""), "root"),
            (&format!("[[token]]\nhash = \"{a}\"\ntenat = \"t\""), "tenant"),
            (
                &format!(
                    "[[token]]\nhash = \"{a}\"\ntenant = \"t\"\n[[token]]\nhash = \"{a}\"\ntenant = \"t\""
                ),
                "twice",
            ),
            (
                &format!(
                    "[[token]]\nhash = \"{a}\"\ntenant = \"t\"\n[[token]]\nhash = \"{b}\"\ntenant = \
                        \"t\"\ndomain = \"d\""
                ),
                "one domain",
            ),
            (
                &format!("[[token]]\nhash = \"{a}\"\ntenant = \"t\"\n[[tenant]]\nname = \"u\""),
                "u has no [[token]]",
            ),
            (
                &format!("[[token]]\nhash = \"{a}\"\ntenant = \"t\"\n[[tenant]]\nname = \"t\"\nrequests = 0"),
                "t has requests = 0",
            ),
            (&format!("[[token]]\nhash = \"{a}\""), "has no tenant"),
            (&format!("[[token]]\nhash = \"{a}\"\nrole = \"peer\"\ntenant = \"t\""), "remove them"),
        ];
        for (text, says) in cases {
            let told = read(text).expect_err(text);
            assert!(told.contains(says), "{says} in {told}");
        }
    }

    #[test]
    fn quotas_have_units_and_absent_ones_no_bound() {
        let text = format!(
            "[[token]]\nhash = \"{}\"\ntenant = \"t\"\n[[tenant]]\nname = \"t\"\nregistered = \"2TiB\"",
            hash("a")
        );
        let tokens = read(&text).expect("holds together");
        let quota = Quota { registered: Some(2 << 40), ..Quota::default() };
        assert_eq!(tokens.quotas(), [(Tenant::new("t").expect("name"), quota)]);
        assert_eq!(tokens.len(), 1);
    }

    #[test]
    fn a_token_is_found_by_the_beginning_of_its_hash() {
        let text = format!("[[token]]\nhash = \"{}\"\ntenant = \"t\"\n", hash("a"));
        let tokens = read(&text).expect("holds together");
        let prefix = u64::from_str_radix(&hash("a").to_string()[..16], 16).expect("digits");
        assert_eq!(prefix_of(&hash("a")), prefix);
        assert_eq!(tokens.of_prefix(prefix), tokens.find(b"a"));
        assert_eq!(tokens.of_prefix(prefix ^ 1), None);
        let twin = format!("{}{}", &hash("a").to_string()[..16], &hash("b").to_string()[16..]);
        let both = text + &format!("[[token]]\nhash = \"{twin}\"\ntenant = \"u\"\n");
        assert_eq!(read(&both).expect("holds together").of_prefix(prefix), None, "two tokens begin so");
    }

    #[test]
    fn a_peer_is_no_tenant() {
        let text = format!("[[token]]\nhash = \"{}\"\nrole = \"peer\"\n", hash("a"));
        let tokens = read(&text).expect("holds together");
        assert_eq!(tokens.find(b"a"), Some(Principal::anonymous(Role::Peer)));
        assert!(tokens.tenants().is_empty());
    }

    #[test]
    fn every_tenant_is_known_with_or_without_a_quota() {
        let rows = ["a", "b"].map(|t| format!("[[token]]\nhash = \"{}\"\ntenant = \"{t}\"\n", hash(t)));
        let quota = "[[tenant]]\nname = \"b\"\nstate = \"1GiB\"\njobs = 7\ndeclared_jobs = 3\nrequests = 9\n\
            origin_requests = 2\n";
        let tokens = read(&(rows.concat() + quota)).expect("holds together");
        let name = |t| Tenant::new(t).expect("name");
        let of_b = Quota {
            state: Some(1 << 30),
            jobs: Some(7),
            declared_jobs: Some(3),
            requests: Some(9),
            origin_requests: Some(2),
            ..Quota::default()
        };
        assert_eq!(tokens.tenants(), [(name("a"), Quota::default()), (name("b"), of_b)]);
    }

    #[test]
    fn roles_are_as_wide_as_documented() {
        let all = [Role::Reader, Role::User, Role::Admin, Role::Monitor, Role::Peer];
        let rights =
            all.map(|r| (r.may_read(), r.may_write(), r.may_see_all_tenants(), r.may_read_metrics()));
        assert_eq!(all.map(Role::may_ask_as_peer), [false, false, false, false, true]);
        assert_eq!(
            rights,
            [
                (true, false, false, false),
                (true, true, false, false),
                (true, true, true, true),
                (false, false, false, true),
                (false, false, false, false)
            ]
        );
        for r in all {
            assert_eq!(r.to_string().parse(), Ok(r));
        }
    }
}
