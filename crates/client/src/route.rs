//! Which server is asked for what: the view of the cluster, and the order in which servers are tried.
//!
//! ```text
//! an answer with a higher Fletch-View ─▶ News (decides when) ─▶ GET /v1/cluster ─▶ RoutedView
//! a chunk        its ranking by the view ─▶ the given servers ─▶ the other members
//! all else       the given servers, in their order ─▶ the members
//! ```
//! 1. Without a view, only the given servers are asked. A server that is alone has no view to fetch.
//! 2. Of the servers in an order, those that rest come last.
//! 3. A view is fetched at most once a second, and at once only if there is none. No call fails because of
//!    it.
//! 4. A client that was given https:// sends nothing to a member without TLS. A client of other machines
//!    sends nothing to its own machine because a view says so.
//! 5. A server may send a request on to another one. The client sends it only to members of the view and to
//!    the given servers.
//! 6. A client of a unix socket has no view: that server knows the user and not a token.

use crate::server::{Connector, Server};
use crate::{ClientConfig, ClientError, Endpoint, Servers};
use fletch_api::{Cluster, cluster::VIEW_ALONE};
use fletch_core::cluster::{Member, Placement};
use fletch_core::{Domain, Hash, StoreKey};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;

/// The shortest time between two fetches of the view.
const FETCH_EVERY: Duration = Duration::from_secs(1);
/// The longest time between two fetches while a member is not up, or did not answer this client.
const TROUBLED_EVERY: Duration = Duration::from_secs(10);
/// After this time without an answer of the known view or a newer one, an older one replaces it.
const OLDER_AFTER: Duration = Duration::from_secs(30);

/// What a request is about. It decides who is asked first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Anything that every server knows.
    Any,
    /// A chunk, or a file in it.
    Chunk {
        /// The chunk.
        hash: Hash,
        /// How many members of its ranking are passed by, because their bytes were wrong.
        skip: usize,
    },
}

/// A member of a view.
#[derive(Debug, Clone)]
struct RoutedMember {
    id: String,
    is_up: bool,
    server: Arc<Server>,
}

/// A view, with the connections to its members.
#[derive(Debug)]
pub(crate) struct RoutedView {
    /// The number of the view.
    pub number: u64,
    /// The entity tag, by which the server says that it is unchanged.
    pub etag: Option<String>,
    /// The caller's domain. Without it, no chunk can be placed.
    domain: Option<Domain>,
    placement: Placement,
    members: Vec<RoutedMember>,
}

impl RoutedView {
    /// Returns the members that serve a chunk, best first; those that are not up come last.
    fn ranking(&self, hash: Hash) -> Vec<&RoutedMember> {
        let Some(domain) = self.domain.clone() else { return Vec::new() };
        let ranked = self.placement.owners(&StoreKey { domain, hash }, self.members.len());
        let member = |m: &Member| self.members.iter().find(|known| known.id == m.id);
        let mut ranking: Vec<&RoutedMember> = ranked.into_iter().filter_map(member).collect();
        ranking.sort_by_key(|m| !m.is_up);
        ranking
    }

    /// Returns the servers in the order in which they are asked, whether they rest or not.
    fn order(&self, given: &[Arc<Server>], subject: Subject) -> Vec<Arc<Server>> {
        let mut order: Vec<Arc<Server>> = Vec::with_capacity(given.len() + self.members.len());
        if let Subject::Chunk { hash, skip } = subject {
            let mut ranking = self.ranking(hash);
            if !ranking.is_empty() {
                let skip = skip % ranking.len();
                ranking.rotate_left(skip);
            }
            order.extend(ranking.into_iter().map(|m| Arc::clone(&m.server)));
        }
        let members = || self.members.iter().map(|m| (m.is_up, &m.server));
        let up = members().filter(|m| m.0).chain(members().filter(|m| !m.0)).map(|m| m.1);
        for server in given.iter().chain(up) {
            if !order.iter().any(|known| Arc::ptr_eq(known, server)) {
                order.push(Arc::clone(server));
            }
        }
        order
    }
}

/// When the view is fetched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct News {
    due: Option<Instant>,
    not_before: Option<Instant>,
    /// Since when answers carry lower numbers than the known view.
    lower_since: Option<Instant>,
}

impl News {
    /// Notes the number in an answer. `jitter`, in 0 … 1, spreads the fetches of many clients.
    fn hear(&mut self, number: u64, known: Option<u64>, now: Instant, jitter: f64) {
        // 0 is a server that waits for its coordinator.
        if number <= VIEW_ALONE {
            return;
        }
        let due = match known {
            None => now,
            Some(known) if number >= known => {
                self.lower_since = None;
                if number == known {
                    return;
                }
                now + FETCH_EVERY.mul_f64(jitter)
            }
            Some(_) => {
                let since = *self.lower_since.get_or_insert(now);
                if now - since < OLDER_AFTER {
                    return;
                }
                now
            }
        };
        self.due = Some(self.due.map_or(due, |known| known.min(due)));
    }

    /// Notes that a member is not up, or did not answer.
    fn trouble(&mut self, now: Instant, jitter: f64) {
        let due = now + TROUBLED_EVERY.mul_f64(0.5 + jitter / 2.0);
        self.due = self.due.or(Some(due));
    }

    /// Returns whether the caller fetches the view now.
    fn takes(&mut self, now: Instant, jitter: f64) -> bool {
        let is_due = self.due.is_some_and(|due| due <= now);
        if !is_due || self.not_before.is_some_and(|at| now < at) {
            return false;
        }
        *self = News { due: None, not_before: Some(now + FETCH_EVERY.mul_f64(1.0 + jitter / 2.0)), ..*self };
        true
    }

    /// Whether a view replaces the known one.
    fn accepts(&self, number: u64, known: Option<u64>, now: Instant) -> bool {
        known.is_none_or(|known| number >= known)
            || self.lower_since.is_some_and(|since| now - since >= OLDER_AFTER)
    }
}

/// The servers that a client knows.
pub(crate) struct Route {
    servers: Servers,
    given: Vec<Arc<Server>>,
    connector: Connector,
    view: RwLock<Option<Arc<RoutedView>>>,
    news: Mutex<News>,
    has_warned: AtomicBool,
}

impl Route {
    /// Prepares the connections to the given servers. Sends nothing.
    ///
    /// # Errors
    /// [`ClientError::Config`]: TLS cannot be set up.
    pub fn new(config: &ClientConfig) -> Result<Self, ClientError> {
        let connector = Connector::new(config);
        let servers = config.servers.clone();
        let given = match servers.is_list() {
            true => {
                servers.iter().map(|at| connector.one_of_several(at.clone())).collect::<Result<_, _>>()?
            }
            false => vec![connector.only(servers.first().clone())?],
        };
        Ok(Route {
            servers,
            given,
            connector,
            view: RwLock::default(),
            news: Mutex::default(),
            has_warned: AtomicBool::new(false),
        })
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock()
    }

    /// Returns the servers that the user named.
    pub fn servers(&self) -> &Servers {
        &self.servers
    }

    /// Returns the given server that is asked first.
    pub fn first(&self) -> Option<&Arc<Server>> {
        self.given.first()
    }

    /// Returns the view, if this client has one.
    pub fn view(&self) -> Option<Arc<RoutedView>> {
        self.view.read().clone()
    }

    /// Returns the members of the view by id and address.
    pub fn members(&self) -> Vec<(String, String)> {
        let view = self.view();
        let members = view.iter().flat_map(|v| &v.members);
        members.map(|m| (m.id.clone(), m.server.shown.to_string())).collect()
    }

    /// Returns the members of the view by id, with the connections to them.
    pub fn known_members(&self) -> Vec<(String, Arc<Server>)> {
        let view = self.view();
        let members = view.iter().flat_map(|v| &v.members);
        members.map(|m| (m.id.clone(), Arc::clone(&m.server))).collect()
    }

    /// Returns the servers in the order in which they are asked.
    pub fn candidates(&self, subject: Subject, now: Instant) -> Vec<Arc<Server>> {
        let mut order = match self.view() {
            Some(view) => view.order(&self.given, subject),
            None => {
                let mut given = self.given.clone();
                if let Subject::Chunk { skip, .. } = subject {
                    let skip = skip % given.len().max(1);
                    given.rotate_left(skip);
                }
                given
            }
        };
        // A stable sort: those that rest keep their order, too.
        order.sort_by_key(|server| server.rests(now));
        order
    }

    /// Returns the server at an address, if it is one of those that this client may ask.
    pub fn at(&self, address: &str) -> Option<Arc<Server>> {
        let view = self.view();
        let members = view.iter().flat_map(|v| v.members.iter().map(|m| &m.server));
        if let Some(known) = self.given.iter().chain(members).find(|s| *s.shown == *address) {
            return Some(Arc::clone(known));
        }
        let endpoint: Endpoint = address.parse().ok()?;
        let is_refused = self.servers.is_unix() || self.refusal(&endpoint).is_some();
        if is_refused { None } else { self.connector.one_of_several(endpoint).ok() }
    }

    /// Returns whether this client knows several servers of one cluster.
    pub fn has_members(&self) -> bool {
        self.view().is_some_and(|view| view.members.len() > 1)
    }

    /// Returns the server at a URL of which `path` is the end, if it is a given one or a member of the view.
    pub fn member_at(&self, url: &str, path: &str) -> Option<Arc<Server>> {
        let endpoint: Endpoint = url.strip_suffix(path)?.parse().ok()?;
        let view = self.view();
        let members = view.iter().flat_map(|v| v.members.iter().map(|m| &m.server));
        self.given.iter().chain(members).find(|s| s.endpoint == endpoint).map(Arc::clone)
    }

    /// Returns whether a server is one that the user named.
    pub fn is_given(&self, server: &Arc<Server>) -> bool {
        self.given.iter().any(|given| Arc::ptr_eq(given, server))
    }

    /// Notes that a server failed.
    pub fn failed(&self, server: &Server, was_silent: bool, now: Instant) {
        server.failed(now, was_silent);
        if self.view().is_some() {
            self.news().trouble(now, rand::random());
        }
    }

    /// Notes the number of a view in an answer. Returns whether the caller fetches the view now.
    pub fn hear(&self, number: Option<u64>, now: Instant) -> bool {
        if self.servers.is_unix() {
            return false;
        }
        let view = self.view();
        let mut news = self.news();
        news.hear(number.unwrap_or(0), view.as_ref().map(|view| view.number), now, rand::random());
        if view.is_some_and(|view| view.members.iter().any(|m| !m.is_up)) {
            news.trouble(now, rand::random());
        }
        news.takes(now, rand::random())
    }

    /// Puts a view in force, if it is not older. Blocking: may read the files of TLS.
    pub fn adopt(&self, cluster: &Cluster, etag: Option<String>, now: Instant) {
        let old = self.view();
        let known = old.as_ref().map(|view| view.number);
        if cluster.view <= VIEW_ALONE || !self.news().accepts(cluster.view, known, now) {
            return;
        }
        let members: Vec<RoutedMember> =
            cluster.members.iter().filter_map(|m| self.member(m, old.as_deref())).collect();
        let weights = cluster.members.iter().map(|m| Member { id: m.id.clone(), weight: m.weight.into() });
        let view = RoutedView {
            number: cluster.view,
            etag,
            domain: cluster.domain.clone(),
            placement: Placement::new(weights),
            members,
        };
        let is_other = old.is_none_or(|old| {
            let same = old.members.len() == view.members.len();
            let mut both = old.members.iter().zip(&view.members);
            !same || both.any(|(a, b)| !Arc::ptr_eq(&a.server, &b.server))
        });
        if is_other {
            let servers: Vec<&str> = view.members.iter().map(|m| &*m.server.shown).collect();
            tracing::info!(view = view.number, ?servers, "chunks are read from the servers of this cluster");
        }
        *self.view.write() = Some(Arc::new(view));
    }

    /// Returns a member with the connections to it, unless nothing may be sent to it.
    fn member(&self, member: &fletch_api::Member, old: Option<&RoutedView>) -> Option<RoutedMember> {
        let endpoint = member.url.parse::<Endpoint>();
        let refusal = endpoint.as_ref().map_or(Some("its address is not valid"), |at| self.refusal(at));
        let server = match (endpoint, refusal) {
            (Ok(endpoint), None) => {
                let before = old.into_iter().flat_map(|v| v.members.iter().map(|m| &m.server));
                let known = self.given.iter().chain(before).find(|s| s.endpoint == endpoint);
                known.map_or_else(|| self.connector.one_of_several(endpoint), |s| Ok(Arc::clone(s)))
            }
            (_, why) => {
                if !self.has_warned.swap(true, Relaxed) {
                    tracing::warn!(
                        member = member.id,
                        url = member.url,
                        why,
                        "nothing is sent to this server of the cluster; the servers that you named are used; \
                         set cluster.advertise_url of that server"
                    );
                }
                return None;
            }
        };
        match server {
            Ok(server) => Some(RoutedMember { id: member.id.clone(), is_up: member.up, server }),
            Err(error) => {
                tracing::warn!(member = member.id, url = member.url, %error, "cannot ask this server");
                None
            }
        }
    }

    /// Returns why nothing is sent to a member (I4).
    fn refusal(&self, endpoint: &Endpoint) -> Option<&'static str> {
        let given = |is: fn(&Endpoint) -> bool| self.servers.iter().any(is);
        if endpoint.is_unix() {
            return Some("it is no URL");
        }
        if given(Endpoint::is_https) && !endpoint.is_https() {
            return Some("it has no TLS, and you named servers with https://");
        }
        (endpoint.is_local() && !given(Endpoint::is_local)).then_some("it is an address of this machine")
    }
}

#[cfg(test)]
mod tests;
