//! The server: whether it answers, its version and its clock, and whether its port is free.

use super::args::DoctorArgs;
use super::finding::Finding;
use super::{Context, maybe};
use crate::failure::Failure;
use fletch_client::{Client, ClientConfig, ClientError, Endpoint, TokenSource};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

pub const SERVER: &str = "server";
pub const PORT: &str = "port";

/// The longest time for an answer of the server.
const WITHIN: Duration = Duration::from_secs(3);

/// The answer of a server to the question what it is.
#[derive(Debug, Clone)]
enum Answer {
    /// Its version.
    Info(String),
    /// It speaks another API or format.
    OtherApi(String),
    /// It wants a token, or another one.
    Denied(String),
    /// It is at a limit, or has no time for this question.
    Busy,
    Silent(String),
    /// No TLS connection comes about, and what to do.
    Untrusted(String, String),
    /// Something answered that is no Fletch server.
    Foreign(String),
}

impl Answer {
    /// Returns whether a server of Fletch answered.
    fn is_of_fletch(&self) -> bool {
        !matches!(self, Answer::Silent(_) | Answer::Untrusted(..) | Answer::Foreign(_))
    }
}

/// The state of the address where the server is to listen.
#[derive(Debug, Clone)]
enum Port {
    Free,
    /// A server of Fletch listens there.
    Fletch,
    Taken,
    Failed(String),
}

#[derive(Debug, Clone)]
pub struct Facts {
    /// The address that the caller gave, with its answer.
    server: Option<(String, Answer)>,
    /// By how many seconds the clock of the server is ahead.
    ahead_s: Option<i64>,
    listen: Option<(SocketAddr, Port)>,
    own_version: &'static str,
}

impl Facts {
    /// # Errors
    /// The address of the server or the token is not valid.
    pub async fn gather(ctx: &Context, args: &DoctorArgs) -> Result<Self, Failure> {
        let mut facts =
            Facts { server: None, ahead_s: None, listen: None, own_version: env!("CARGO_PKG_VERSION") };
        if let Some(client) = client(ctx)? {
            facts.server = Some((client.servers().to_string(), ask(&client).await));
            facts.ahead_s = client.stats().clock_ahead_s;
        }
        if args.listen != "none" {
            let address: SocketAddr = args.listen.parse().map_err(|_| {
                Failure::usage(format!("--listen {:?} is no address", args.listen))
                    .hint("write IP:PORT, such as 127.0.0.1:7380, or none")
            })?;
            facts.listen = Some((address, port(address).await));
        }
        Ok(facts)
    }

    /// Returns whether a server answered, where the caller said or where servers listen.
    pub fn answers(&self) -> bool {
        self.server.as_ref().is_some_and(|(_, answer)| answer.is_of_fletch())
            || matches!(self.listen, Some((_, Port::Fletch)))
    }

    /// Returns the names of the checks that ran.
    pub fn checks(&self) -> Vec<&'static str> {
        let server = self.server.as_ref().map(|_| SERVER);
        server.into_iter().chain(self.listen.as_ref().map(|_| PORT)).collect()
    }

    /// Returns the server, and by how many seconds its clock is ahead.
    pub fn clock(&self) -> Option<(String, i64)> {
        Some((self.server.as_ref()?.0.clone(), self.ahead_s?))
    }

    pub fn findings(&self) -> Vec<Finding> {
        [self.server_finding(), self.port_finding()].into_iter().flat_map(maybe).collect()
    }

    fn server_finding(&self) -> Option<Finding> {
        let (at, answer) = self.server.as_ref()?;
        let own = self.own_version;
        Some(match answer {
            Answer::Busy => return None,
            Answer::Info(version) if version == own => return None,
            Answer::Info(version) => Finding::warning(
                SERVER,
                format!("{at} runs fletch-server {version}, and this is fletch {own}"),
                "restart the server with the newer build: use builds of one release",
            ),
            Answer::OtherApi(why) => Finding::error(
                SERVER,
                why.clone(),
                "install the same release on both machines, and restart the server",
            ),
            Answer::Denied(why) => Finding::error(
                SERVER,
                format!("{at} refuses this user: {why}"),
                "give a token of this server: --token-file FILE, or FLETCH_TOKEN",
            ),
            Answer::Silent(why) => Finding::error(
                SERVER,
                format!("{at} does not answer: {why}"),
                "start it there: fletch-server; or correct --server and FLETCH_SERVER",
            ),
            Answer::Untrusted(what, fix) => Finding::error(SERVER, what.clone(), fix.clone()),
            Answer::Foreign(why) => Finding::error(
                SERVER,
                format!("{at} is no fletch-server: {why}"),
                "correct --server and FLETCH_SERVER; a server listens on port 7380 by default",
            ),
        })
    }

    fn port_finding(&self) -> Option<Finding> {
        let (address, port) = self.listen.as_ref()?;
        let other = "give fletch-server another address: --listen 127.0.0.1:0 takes a free port";
        Some(match port {
            Port::Free | Port::Fletch => return None,
            Port::Taken => Finding::error(
                PORT,
                format!("another program listens on {address}, so fletch-server cannot"),
                format!("stop that program (ss -ltnp names it), or {other}"),
            ),
            Port::Failed(why) => {
                Finding::error(PORT, format!("fletch-server cannot listen on {address}: {why}"), other)
            }
        })
    }
}

/// Returns a client of the server that is asked, if there is one.
///
/// # Errors
/// The address of the server or the token is not valid.
pub fn client(ctx: &Context) -> Result<Option<Client>, Failure> {
    let Some(chosen) = ctx.chosen()? else { return Ok(None) };
    let token = TokenSource::of(ctx.global.token.clone(), ctx.global.token_file.clone())
        .map_err(|e| Failure::usage(e.to_string()))?;
    let config = ClientConfig::of(chosen.servers().clone(), "cli");
    Ok(Some(Client::new(ClientConfig { token, tls: ctx.global.tls(), ..config })?))
}

async fn ask(client: &Client) -> Answer {
    match client.within(WITHIN).fail_fast().info().await {
        Ok(info) => Answer::Info(info.version),
        Err(e @ ClientError::Version { .. }) => Answer::OtherApi(e.to_string()),
        Err(e) if e.is_denied() => Answer::Denied(e.to_string()),
        Err(ClientError::Unreachable { why, .. }) => Answer::Silent(why),
        Err(e @ ClientError::Tls { .. }) => {
            let (what, advice) = e.parts();
            Answer::Untrusted(what, advice.unwrap_or_default().to_owned())
        }
        Err(ClientError::Problem { .. }) => Answer::Busy,
        Err(e) => Answer::Foreign(e.to_string()),
    }
}

async fn port(address: SocketAddr) -> Port {
    match TcpListener::bind(address) {
        Ok(_) => Port::Free,
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            let endpoint: Result<Endpoint, _> = format!("http://{address}").parse();
            let client = endpoint.ok().and_then(|at| Client::new(ClientConfig::new(at, "cli")).ok());
            let answer = match &client {
                Some(client) => ask(client).await,
                None => return Port::Taken,
            };
            if answer.is_of_fletch() { Port::Fletch } else { Port::Taken }
        }
        Err(e) => Port::Failed(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    fn with(answer: Answer) -> Facts {
        let server = Some(("http://s:7380".to_owned(), answer));
        Facts { server, ahead_s: None, listen: None, own_version: "1.2.0" }
    }

    #[test]
    fn each_answer_of_the_server_has_its_finding() {
        let found = |answer| with(answer).findings().into_iter().next();
        assert_eq!(found(Answer::Info("1.2.0".into())), None);
        let older = found(Answer::Info("1.1.0".into())).expect("older");
        assert!(
            older.severity == Severity::Warning && older.what.contains("fletch-server 1.1.0"),
            "{older:?}"
        );
        for (answer, fix) in [
            (Answer::OtherApi("x".into()), "same release"),
            (Answer::Denied("x".into()), "--token-file"),
            (Answer::Silent("refused".into()), "start it there"),
            (Answer::Untrusted("x".into(), "give --ca-file".into()), "--ca-file"),
            (Answer::Foreign("x".into()), "port 7380"),
        ] {
            let found = found(answer).expect("a finding");
            assert!(found.severity == Severity::Error && found.fix.contains(fix), "{found:?}");
        }
    }

    #[tokio::test]
    async fn a_port_is_free_or_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        // Something that accepts connections and closes them.
        let closes = std::thread::spawn(move || listener.incoming().take(1).for_each(drop));
        let taken = port(address).await;
        let facts = Facts { server: None, ahead_s: None, listen: Some((address, taken)), own_version: "1" };
        let found = facts.findings();
        assert!(found.len() == 1 && found[0].check == PORT, "{found:?}");
        closes.join().expect("thread");
        assert!(matches!(port(address).await, Port::Free), "the fix: the other program ended");
    }
}
