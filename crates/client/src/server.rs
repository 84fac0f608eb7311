//! The connections to one server, and how it did lately.
//!
//! 1. A server that refused a connection or was silent rests for 2, 4 … 10 s: others are asked first.
//! 2. After silence one caller probes the server before it gets a request again.
//! 3. A server that refuses a token is passed by for a minute: a token that was just made or changed reaches
//!    the servers of a cluster one after the other. After that its refusal counts.
//! 4. Of a name with several addresses, the one that answered last is tried first.

use crate::tls::{HttpClient, TlsOptions};
use crate::{ClientConfig, ClientError, Endpoint};
use fletch_api::{TermStamp, headers};
use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// The first and the longest rest of a server.
const RESTS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// For how long others leave a server to the caller that probes it.
const PROBE_TURN: Duration = Duration::from_secs(2);
/// For how long other servers are asked after the first refusal of a token by a server: as long as a Secret
/// of Kubernetes takes to reach all nodes.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// The longest time for a connection to a server that no other one can replace.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// The longest time for a connection to a server that another one can replace.
const CONNECT_SOON: Duration = Duration::from_secs(2);
/// The most names whose addresses are remembered.
const NAMES_MAX: usize = 1024;

/// How a server did lately.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Health {
    /// When the rest ends. `None`: the last request was answered.
    until: Option<Instant>,
    /// How long the rest is.
    rest: Duration,
    /// Whether the server was silent, instead of refusing a connection.
    was_silent: bool,
}

impl Health {
    fn failed(&mut self, now: Instant, was_silent: bool) {
        // Requests that fail together count once.
        if self.rests(now) {
            return;
        }
        self.rest = if self.rest.is_zero() { RESTS.0 } else { (self.rest * 2).min(RESTS.1) };
        *self = Health { until: Some(now + self.rest), was_silent, ..*self };
    }

    fn rests(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Whether the caller is the one that probes the server. Others see it resting meanwhile.
    fn takes_probe(&mut self, now: Instant) -> bool {
        let is_due = self.was_silent && !self.rests(now);
        if is_due {
            self.until = Some(now + PROBE_TURN);
        }
        is_due
    }
}

/// Of each name with several addresses, the address that answered last.
#[derive(Debug, Default)]
struct Addresses(Mutex<HashMap<String, IpAddr>>);

impl Addresses {
    fn answered(&self, name: &str, ip: IpAddr) {
        let mut good = self.0.lock();
        if good.len() >= NAMES_MAX && !good.contains_key(name) {
            good.clear();
        }
        if good.get(name) != Some(&ip) {
            good.insert(name.to_owned(), ip);
        }
    }

    /// Orders the addresses of a name. The families keep their order, so that the system's preference counts.
    fn ordered(&self, name: &str, mut found: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let first_is_v6 = found.first().is_some_and(SocketAddr::is_ipv6);
        let good = self.0.lock().get(name).copied();
        // Clients that share a name prefer the same server, whatever the order of the resolver.
        found.sort_by_key(|a| (Some(a.ip()) != good, a.is_ipv6() != first_is_v6, a.ip()));
        found
    }
}

/// Resolves names as the system does, and orders the addresses.
struct OrderedNames(Arc<Addresses>);

impl Resolve for OrderedNames {
    fn resolve(&self, name: Name) -> Resolving {
        let addresses = Arc::clone(&self.0);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            Ok(Box::new(addresses.ordered(name.as_str(), found).into_iter()) as Addrs)
        })
    }
}

/// Connects to servers. All servers of a client share it.
pub(crate) struct Connector {
    tls: TlsOptions,
    io_timeout: Duration,
    connections_idle_max: usize,
    component: &'static str,
    addresses: Arc<Addresses>,
    /// The connections to servers that others can replace: without TLS, and with it. Made when needed.
    shared: Mutex<[Option<Arc<HttpClient>>; 2]>,
}

impl Connector {
    /// Returns what connects by these settings.
    pub fn new(config: &ClientConfig) -> Self {
        Connector {
            tls: config.tls.clone(),
            io_timeout: config.io_timeout,
            connections_idle_max: config.connections_idle_max,
            component: config.component,
            addresses: Arc::default(),
            shared: Mutex::default(),
        }
    }

    /// Prepares the connections to the only server of a client. Reads the files of TLS, and sends nothing.
    ///
    /// # Errors
    /// [`ClientError::Config`]: TLS cannot be set up.
    pub fn only(&self, endpoint: Endpoint) -> Result<Arc<Server>, ClientError> {
        let http = self.http(&endpoint, CONNECT_WITHIN)?;
        Ok(self.server(endpoint, http))
    }

    /// As [`Connector::only`], for a server that others can replace.
    ///
    /// # Errors
    /// As [`Connector::only`].
    pub fn one_of_several(&self, endpoint: Endpoint) -> Result<Arc<Server>, ClientError> {
        let slot = usize::from(endpoint.is_https());
        let mut shared = self.shared.lock();
        let http = match &shared[slot] {
            Some(http) => Arc::clone(http),
            None => Arc::clone(shared[slot].insert(self.http(&endpoint, CONNECT_SOON)?)),
        };
        drop(shared);
        Ok(self.server(endpoint, http))
    }

    fn server(&self, endpoint: Endpoint, http: Arc<HttpClient>) -> Arc<Server> {
        Arc::new(Server {
            http,
            base: endpoint.base().into(),
            shown: endpoint.to_string().into(),
            endpoint,
            addresses: Arc::clone(&self.addresses),
            health: Mutex::default(),
            refuses_since: Mutex::default(),
        })
    }

    fn http(&self, endpoint: &Endpoint, connect: Duration) -> Result<Arc<HttpClient>, ClientError> {
        let files = if endpoint.is_https() { self.tls.clone() } else { TlsOptions::default() };
        let socket = match endpoint {
            Endpoint::Unix(path) => Some(path.clone()),
            Endpoint::Http(_) => None,
        };
        let (io_timeout, idle_max) = (self.io_timeout, self.connections_idle_max);
        let mut always = HeaderMap::new();
        always.insert(HeaderName::from_static(headers::COMPONENT), HeaderValue::from_static(self.component));
        let names = Arc::clone(&self.addresses);
        let settings = move || {
            let http = reqwest::Client::builder()
                .default_headers(always.clone())
                .user_agent(concat!("fletch-client/", env!("CARGO_PKG_VERSION")))
                .http1_only()
                .tcp_nodelay(true)
                .no_proxy()
                .redirect(reqwest::redirect::Policy::none())
                .pool_max_idle_per_host(idle_max)
                .pool_idle_timeout(Duration::from_secs(60))
                .connect_timeout((io_timeout / 2).min(connect))
                // Half the deadline: a connection that went silent leaves time for another attempt.
                .read_timeout(io_timeout / 2);
            match &socket {
                Some(path) => http.unix_socket(path.clone()),
                None => http.dns_resolver(Arc::new(OrderedNames(Arc::clone(&names)))),
            }
        };
        HttpClient::new(files, Box::new(settings))
    }
}

/// A refusal of a token by one server of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The first one: others are asked.
    First,
    /// Another one soon after the first one: others are asked.
    Again,
    /// The server refuses the token for longer than a change of tokens takes.
    Final,
}

/// One server, and the connections to it.
pub(crate) struct Server {
    pub http: Arc<HttpClient>,
    pub endpoint: Endpoint,
    /// The URL to which the paths of routes are appended.
    pub base: Box<str>,
    /// The address, for people.
    pub shown: Box<str>,
    addresses: Arc<Addresses>,
    health: Mutex<Health>,
    /// Since when the server refuses the client's token.
    refuses_since: Mutex<Option<Instant>>,
}

impl Server {
    /// Notes that the server answered, from an address.
    pub fn answered(&self, from: Option<SocketAddr>) {
        let mut health = self.health.lock();
        if *health != Health::default() {
            *health = Health::default();
        }
        drop(health);
        *self.refuses_since.lock() = None;
        if let (Some(from), Some(name)) = (from, self.endpoint.name()) {
            self.addresses.answered(name, from.ip());
        }
    }

    /// Notes that the server refused a connection, or was silent.
    pub fn failed(&self, now: Instant, was_silent: bool) {
        self.health.lock().failed(now, was_silent);
    }

    /// Notes that the server refused the token. Returns whether this is the first refusal, and whether other
    /// servers may be asked.
    pub fn refused(&self, now: Instant) -> Refusal {
        let mut since = self.refuses_since.lock();
        match *since {
            None => {
                *since = Some(now);
                Refusal::First
            }
            Some(first) if now - first < REFUSED_FOR => Refusal::Again,
            Some(_) => Refusal::Final,
        }
    }

    /// Returns whether others are asked first.
    pub fn rests(&self, now: Instant) -> bool {
        self.health.lock().rests(now)
    }

    /// Returns whether the server was silent when it was last asked.
    pub fn was_silent(&self) -> bool {
        self.health.lock().was_silent
    }

    /// Returns whether the caller is the one that probes the server after its rest.
    pub fn takes_probe(&self, now: Instant) -> bool {
        self.health.lock().takes_probe(now)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

/// The server that has a job, as far as a handle of the job knows. Clones of the handle share it.
#[derive(Debug, Default)]
pub(crate) struct JobServer {
    server: Mutex<Option<Arc<Server>>>,
    /// The group of the job, and the highest term of it that a server named.
    term: Mutex<Option<(String, u64)>>,
    /// Notified when a server says that the job waits for its server.
    pub waits: Notify,
}

impl JobServer {
    pub fn new(server: Option<Arc<Server>>) -> Self {
        JobServer { server: Mutex::new(server), term: Mutex::default(), waits: Notify::new() }
    }

    /// Returns the highest term of the job that a server named.
    pub fn term(&self) -> Option<u64> {
        self.term.lock().as_ref().map(|known| known.1)
    }

    pub fn get(&self) -> Option<Arc<Server>> {
        self.server.lock().clone()
    }

    /// Checks that an answer is of the highest term that a server named. Returns why it does not count.
    ///
    /// # Errors
    /// What is wrong with the answer.
    pub fn check_term(&self, told: &TermStamp) -> Result<(), String> {
        let mut known = self.term.lock();
        match &mut *known {
            Some((group, term)) if *group == told.group => {
                if told.term < *term {
                    let TermStamp { group, term: old, .. } = told;
                    return Err(format!("it answers for {group} by the term {old}, which term {term} ended"));
                }
                *term = told.term;
            }
            // The job was declared anew, in another group.
            _ => *known = Some((told.group.clone(), told.term)),
        }
        Ok(())
    }

    /// Notes that a server answered for the job.
    pub fn answered(&self, server: &Arc<Server>) {
        *self.server.lock() = Some(Arc::clone(server));
    }

    /// Forgets a server that did not serve the job.
    pub fn forget(&self, failed: &Arc<Server>) {
        let mut known = self.server.lock();
        if known.as_ref().is_some_and(|server| Arc::ptr_eq(server, failed)) {
            *known = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn rests_grow_until_an_answer() {
        let s = Duration::from_secs;
        let mut health = Health::default();
        for rest in [2, 4, 8, 10, 10] {
            assert!(!health.rests(Instant::now()));
            health.failed(Instant::now(), false);
            // Other requests that were under way fail, too.
            health.failed(Instant::now(), false);
            advance(s(rest) - Duration::from_millis(1)).await;
            assert!(health.rests(Instant::now()), "{rest} s");
            assert!(!health.takes_probe(Instant::now()), "it did not hang");
            advance(Duration::from_millis(1)).await;
        }
        health = Health::default();
        health.failed(Instant::now(), true);
        advance(s(2)).await;
        assert!(health.takes_probe(Instant::now()), "one caller probes");
        assert!(!health.takes_probe(Instant::now()) && health.rests(Instant::now()), "the others go on");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_final_after_a_minute() {
        let connector = Connector::new(&ClientConfig::new("http://a:1".parse().expect("a URL"), "cli"));
        let server = connector.only("http://a:1".parse().expect("a URL")).expect("prepared");
        assert_eq!(server.refused(Instant::now()), Refusal::First);
        advance(REFUSED_FOR - Duration::from_secs(1)).await;
        assert_eq!(server.refused(Instant::now()), Refusal::Again);
        advance(Duration::from_secs(1)).await;
        assert_eq!(server.refused(Instant::now()), Refusal::Final);
        server.answered(None);
        assert_eq!(server.refused(Instant::now()), Refusal::First, "it accepted the token meanwhile");
    }

    #[test]
    fn an_answer_of_a_lower_term_does_not_count() {
        let told = |group: &str, term| TermStamp { group: group.into(), term, valid: Duration::ZERO };
        let job = JobServer::default();
        for term in [2, 2, 5] {
            assert_eq!(job.check_term(&told("job-1", term)), Ok(()), "{term}");
        }
        let refused = job.check_term(&told("job-1", 4)).expect_err("it is old");
        assert!(refused.contains("term 4") && refused.contains("term 5"), "{refused}");
        assert_eq!(job.check_term(&told("job-1", 5)), Ok(()));
        assert_eq!(job.check_term(&told("sweep-1.0", 1)), Ok(()), "terms of two groups do not compare");
    }

    #[test]
    fn the_address_that_answered_last_is_tried_first() {
        let at = |ip: &str| SocketAddr::new(ip.parse().expect("an address"), 0);
        let all = || vec![at("10.0.0.3"), at("10.0.0.1"), at("::1"), at("10.0.0.2")];
        let addresses = Addresses::default();
        let ips = || {
            let ordered = addresses.ordered("name", all());
            ordered.iter().map(|a| a.ip().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(ips(), ["10.0.0.1", "10.0.0.2", "10.0.0.3", "::1"]);
        addresses.answered("other", at("10.0.0.2").ip());
        addresses.answered("name", at("10.0.0.3").ip());
        assert_eq!(ips(), ["10.0.0.3", "10.0.0.1", "10.0.0.2", "::1"]);
        addresses.answered("name", at("10.0.0.9").ip());
        assert_eq!(ips()[0], "10.0.0.1", "it is gone");
    }
}
