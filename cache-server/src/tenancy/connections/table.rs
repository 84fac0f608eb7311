//! Decides which connections are open: who is served, who is only answered, and who is closed. Pure.
//!
//! ```text
//! newcomer ─▶ its source is below its limit, and the listener below its own ─▶ served
//!          ─▶ else close: the oldest unproven connection (of the source, if the source is at its limit),
//!             else the connection that has been idle longest (of the source, or of the largest source)
//!             ─▶ served
//!          ─▶ nothing to close: every connection runs a request ─▶ the probe lane, which answers probes
//!             and 429, and closes its own oldest connection for a newcomer
//! ```
//! A connection is *unproven* until its first request was authenticated. Without tokens, until its first
//! request was received completely.
//!
//! Invariants:
//! 1. A newcomer is never kept waiting: it is served, or it is in the probe lane.
//! 2. A connection that runs a request of a known caller is never closed to make room.
//! 3. Each listener has connections of its own, so that TCP cannot shut out the unix socket.

use fletch_core::Tenant;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    net::{IpAddr, Ipv6Addr},
};

/// The number of a connection. A later connection has a larger one.
pub type ConnectionId = u64;

/// The listener that accepted a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Listener {
    Tcp,
    /// The unix socket.
    Unix,
}

/// Where a connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// An address. Of IPv6 only the network of 64 bits counts, because one host has all of it.
    Address(IpAddr),
    /// A user of this machine, by the peer's uid of the unix socket.
    User(u32),
}

impl Source {
    /// Returns the source of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        Source::Address(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6) & !u128::from(u64::MAX))),
            v4 => v4,
        })
    }

    /// Returns whether the source is on this machine: a user of the socket, or a loopback address.
    #[must_use]
    pub fn is_own_machine(&self) -> bool {
        match self {
            Source::User(_) => true,
            Source::Address(IpAddr::V4(v4)) => v4.is_loopback(),
            // The network of ::1, as `of` keeps it.
            Source::Address(IpAddr::V6(v6)) => v6.is_unspecified(),
        }
    }

    /// Returns the listener of the source.
    #[must_use]
    pub fn listener(&self) -> Listener {
        match self {
            Source::Address(_) => Listener::Tcp,
            Source::User(_) => Listener::Unix,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Address(address) => address.fmt(f),
            Source::User(uid) => write!(f, "uid {uid}"),
        }
    }
}

/// The limits of the table.
#[derive(Debug, Clone, Copy)]
pub struct TableLimits {
    /// Connections over TCP.
    pub tcp: usize,
    /// Connections over the unix socket.
    pub unix: usize,
    /// Connections of one source or tenant. On the unix socket a user has at most half.
    pub per_caller: usize,
    /// Connections in the probe lane of each listener.
    pub probes: usize,
}

/// Why a connection is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The listener is at its limit, and every connection runs a request.
    All,
    /// The source is at its limit, and each of its connections runs a request.
    Source,
    /// The tenant is at its limit, and each of its connections runs a request.
    Tenant,
    /// The memory for requests is used up.
    Memory,
}

impl Refusal {
    /// Every reason.
    pub const ALL: [Refusal; 4] = [Refusal::All, Refusal::Source, Refusal::Tenant, Refusal::Memory];

    /// Returns the word of the reason in metrics and log lines.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Refusal::All => "all",
            Refusal::Source => "source",
            Refusal::Tenant => "tenant",
            Refusal::Memory => "memory",
        }
    }
}

/// What becomes of a newcomer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// `None`: it is served. Otherwise it is in the probe lane.
    pub refused: Option<Refusal>,
    /// The connection to close for it.
    pub close: Option<ConnectionId>,
}

#[derive(Debug, Default)]
struct Members {
    all: BTreeSet<ConnectionId>,
    unproven: BTreeSet<ConnectionId>,
}

/// The open connections.
#[derive(Debug)]
pub struct ConnectionTable {
    limits: TableLimits,
    connections: HashMap<ConnectionId, (Source, Option<Tenant>)>,
    listeners: BTreeMap<Listener, Members>,
    sources: HashMap<Source, Members>,
    tenants: HashMap<Tenant, BTreeSet<ConnectionId>>,
    probes: BTreeMap<Listener, BTreeSet<ConnectionId>>,
}

/// Returns the connection of a set that has been idle longest.
fn longest_idle(
    of: &BTreeSet<ConnectionId>,
    idle_since: &impl Fn(ConnectionId) -> Option<u64>,
) -> Option<ConnectionId> {
    of.iter().filter_map(|id| Some((idle_since(*id)?, *id))).min().map(|(_, id)| id)
}

impl ConnectionTable {
    /// Creates an empty table.
    #[must_use]
    pub fn new(limits: TableLimits) -> Self {
        let listeners = [Listener::Tcp, Listener::Unix];
        ConnectionTable {
            limits,
            connections: HashMap::new(),
            listeners: listeners.map(|l| (l, Members::default())).into(),
            sources: HashMap::new(),
            tenants: HashMap::new(),
            probes: listeners.map(|l| (l, BTreeSet::new())).into(),
        }
    }

    fn most(&self, listener: Listener) -> usize {
        match listener {
            Listener::Tcp => self.limits.tcp,
            Listener::Unix => self.limits.unix,
        }
    }

    fn most_of(&self, source: Source) -> usize {
        match source.listener() {
            Listener::Tcp => self.limits.per_caller.min(self.limits.tcp),
            Listener::Unix => (self.limits.unix / 2).max(1),
        }
    }

    /// Admits a newcomer, whose number is larger than all before.
    ///
    /// `idle_since` returns since when a connection waits for a request, or `None` while one runs.
    pub fn admit(
        &mut self,
        id: ConnectionId,
        source: Source,
        idle_since: impl Fn(ConnectionId) -> Option<u64>,
    ) -> Admission {
        let listener = source.listener();
        let own = self.sources.get(&source);
        let (full, close) = if own.is_some_and(|own| own.all.len() >= self.most_of(source)) {
            let close = own.and_then(|own| {
                own.unproven.first().copied().or_else(|| longest_idle(&own.all, &idle_since))
            });
            (Some(Refusal::Source), close)
        } else if self.listeners[&listener].all.len() >= self.most(listener) {
            let unproven = self.listeners[&listener].unproven.first().copied();
            (Some(Refusal::All), unproven.or_else(|| self.idle_of_largest(listener, &idle_since)))
        } else {
            (None, None)
        };
        match (full, close) {
            (Some(refused), None) => Admission { refused: Some(refused), close: self.divert(id, listener) },
            (_, close) => {
                if let Some(close) = close {
                    self.remove(close);
                }
                self.insert(id, source);
                Admission { refused: None, close }
            }
        }
    }

    /// Puts a connection into the probe lane. Returns the one that leaves the lane for it.
    pub fn divert(&mut self, id: ConnectionId, listener: Listener) -> Option<ConnectionId> {
        self.remove(id);
        let most = self.limits.probes;
        let lane = self.probes.entry(listener).or_default();
        lane.insert(id);
        if lane.len() > most { lane.pop_first() } else { None }
    }

    /// Returns the idle connection to close, of the source with the most connections that has one.
    fn idle_of_largest(
        &self,
        listener: Listener,
        idle_since: &impl Fn(ConnectionId) -> Option<u64>,
    ) -> Option<ConnectionId> {
        let mut sources: Vec<_> = self.sources.iter().filter(|(s, _)| s.listener() == listener).collect();
        sources.sort_by_key(|(source, of)| (std::cmp::Reverse(of.all.len()), **source));
        sources.into_iter().find_map(|(_, of)| longest_idle(&of.all, idle_since))
    }

    /// Notes that a connection's request was authenticated, as `tenant` where tokens tell tenants apart.
    ///
    /// Returns the idle connection to close if the tenant is at its limit.
    ///
    /// # Errors
    /// [`Refusal::Tenant`] if there is none: then this connection is to be closed.
    pub fn prove(
        &mut self,
        id: ConnectionId,
        tenant: Option<&Tenant>,
        idle_since: impl Fn(ConnectionId) -> Option<u64>,
    ) -> Result<Option<ConnectionId>, Refusal> {
        let Some((source, known)) = self.connections.get_mut(&id) else { return Ok(None) };
        let source = *source;
        let mut close = None;
        if let Some(tenant) = tenant
            && known.is_none()
        {
            let of = self.tenants.entry(tenant.clone()).or_default();
            if of.len() >= self.limits.per_caller {
                close = Some(longest_idle(of, &idle_since).ok_or(Refusal::Tenant)?);
            }
            of.insert(id);
            *known = Some(tenant.clone());
        }
        self.listeners.entry(source.listener()).or_default().unproven.remove(&id);
        if let Some(of) = self.sources.get_mut(&source) {
            of.unproven.remove(&id);
        }
        if let Some(close) = close {
            self.remove(close);
        }
        Ok(close)
    }

    /// Removes and returns the oldest unproven connection that `holds` memory for a head.
    ///
    /// It is one of the source, or of any source if the source has none.
    pub fn shed(&mut self, source: Source, holds: impl Fn(ConnectionId) -> bool) -> Option<ConnectionId> {
        let own = self.sources.get(&source).into_iter();
        let all = own.chain(self.listeners.values()).flat_map(|members| &members.unproven);
        let id = all.copied().find(|id| holds(*id))?;
        self.remove(id);
        Some(id)
    }

    fn insert(&mut self, id: ConnectionId, source: Source) {
        self.connections.insert(id, (source, None));
        let of_listener = self.listeners.entry(source.listener()).or_default();
        let of_source = self.sources.entry(source).or_default();
        for members in [of_listener, of_source] {
            members.all.insert(id);
            members.unproven.insert(id);
        }
    }

    /// Removes a connection that ended, or that is to be closed. Does nothing if it is not there.
    pub fn remove(&mut self, id: ConnectionId) {
        for lane in self.probes.values_mut() {
            lane.remove(&id);
        }
        let Some((source, tenant)) = self.connections.remove(&id) else { return };
        if let Some(members) = self.listeners.get_mut(&source.listener()) {
            members.all.remove(&id);
            members.unproven.remove(&id);
        }
        if let Some(members) = self.sources.get_mut(&source) {
            members.all.remove(&id);
            members.unproven.remove(&id);
            if members.all.is_empty() {
                self.sources.remove(&source);
            }
        }
        if let Some(tenant) = tenant
            && let Some(of) = self.tenants.get_mut(&tenant)
        {
            of.remove(&id);
            if of.is_empty() {
                self.tenants.remove(&tenant);
            }
        }
    }

    /// Returns the number of served connections of a listener.
    #[must_use]
    pub fn open(&self, listener: Listener) -> usize {
        self.listeners.get(&listener).map_or(0, |members| members.all.len())
    }

    /// Returns the number of connections in the probe lanes.
    #[must_use]
    pub fn in_probe_lanes(&self) -> usize {
        self.probes.values().map(BTreeSet::len).sum()
    }
}

#[cfg(test)]
mod tests;
