//! Asks a member that takes long for a sign of life, as clients do (`crates/client`, retries).
//!
//! A member that accepts connections and does not answer, such as a stopped process or a proxy that lost its
//! server, would otherwise cost every read its whole deadline.

use super::{CallError, PeerAddress, PeerState, Peers, Rest};
use fletch_api::routes;
use std::time::{Duration, Instant};
use tokio::time::{Instant as Deadline, sleep, timeout};

/// After this time without an answer a member is asked for a sign of life; then after twice the time, and so
/// on.
const PROBE_AFTER: Duration = Duration::from_secs(2);
/// How long it may take to give one.
const PROBE_WITHIN: Duration = Duration::from_secs(1);

impl Peers {
    /// Waits for a call, and gives it up if the member gives no sign of life meanwhile.
    pub(super) async fn watched<T>(
        &self,
        to: &PeerAddress,
        call: impl Future<Output = Result<T, CallError>>,
        until: Deadline,
    ) -> Result<T, CallError> {
        tokio::pin!(call);
        let mut pause = PROBE_AFTER.min(until.saturating_duration_since(Deadline::now()) / 4);
        loop {
            tokio::select! {
                done = &mut call => return done,
                () = sleep(pause) => {}
            }
            // A member that answers has its reasons for being slow.
            tokio::select! {
                done = &mut call => return done,
                is_alive = self.is_alive(to) => if !is_alive {
                    return Err(CallError::Silent);
                },
            }
            pause *= 2;
        }
    }

    /// Whether a member may be asked that was silent when it was asked last. One call asks it for a sign of
    /// life, and the others pass it by meanwhile.
    pub(super) async fn answers_again(&self, to: &PeerAddress, state: &PeerState) -> bool {
        {
            let mut rest = state.rest.lock();
            if !rest.was_silent {
                return true;
            }
            let now = Instant::now();
            if rest.until.is_some_and(|until| until > now) {
                return false;
            }
            rest.until = Some(now + 2 * PROBE_WITHIN);
        }
        let is_alive = self.is_alive(to).await;
        if is_alive {
            *state.rest.lock() = Rest::default();
        } else {
            state.rest.lock().until = None;
            self.rest(&to.id, state, &CallError::Silent);
        }
        is_alive
    }

    async fn is_alive(&self, to: &PeerAddress) -> bool {
        let probe = self.client.current().get(format!("{}{}", to.url, routes::LIVEZ)).send();
        timeout(PROBE_WITHIN, probe).await.is_ok_and(|answer| answer.is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{open, peers, request, to};
    use super::*;
    use crate::cluster::peers::PeerAnswer;
    use fletch_testkit::scripted::{self, ScriptedServer};
    use std::{net::TcpListener, thread};

    #[tokio::test]
    async fn a_member_that_accepts_and_does_not_answer_costs_one_read_three_seconds() {
        let peers = peers(&open());
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        thread::spawn(move || listener.incoming().flatten().collect::<Vec<_>>());
        let until = || Deadline::now() + Duration::from_secs(30);
        let began = Instant::now();
        assert!(matches!(peers.ask(&to(&url), &request(5), until()).await, PeerAnswer::Failed));
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        assert!(!peers.may_ask(&to(&url).id), "it rests");
        // After its rest one call asks for a sign of life, and the others do not wait.
        let state = peers.state(&to(&url).id);
        state.rest.lock().until = None;
        let (began, member, asked) = (Instant::now(), to(&url), request(5));
        let (first, second) =
            tokio::join!(peers.ask(&member, &asked, until()), peers.ask(&member, &asked, until()));
        assert!(matches!((first, second), (PeerAnswer::Failed, PeerAnswer::Failed)));
        assert!(began.elapsed() < Duration::from_millis(1_500), "{:?}", began.elapsed());
        assert_eq!(state.rest.lock().last, Duration::from_secs(4));
        // It is back.
        state.rest.lock().until = None;
        let server = ScriptedServer::start(|_| scripted::answer("404 Not Found", &[], b""));
        assert!(matches!(peers.ask(&to(&server.endpoint()), &request(5), until()).await, PeerAnswer::Absent));
        assert!(!state.rest.lock().was_silent);
    }

    #[tokio::test]
    async fn a_slow_member_that_lives_is_waited_for() {
        let peers = peers(&open());
        let server = ScriptedServer::start(|head| {
            if !head.contains("/livez") {
                thread::sleep(Duration::from_millis(2_500));
            }
            scripted::answer("404 Not Found", &[], b"")
        });
        let until = Deadline::now() + Duration::from_secs(30);
        assert!(matches!(peers.ask(&to(&server.endpoint()), &request(5), until).await, PeerAnswer::Absent));
    }
}
