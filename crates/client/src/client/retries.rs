//! Calls that are made again: the deadline, the rounds over servers, and the servers that are passed by.
//!
//! ```text
//!            ┌──────── backoff, within the deadline ────────┐
//!            ▼                                              │ all are silent, or ask to come later
//!   call ─▶ round: first server ─▶ second ─▶ … ─▶ last ─────┤
//!                                                           └▶ an answer, or an error that will not pass
//! ```

use super::{Client, JSON_BYTES_MAX, responder};
use crate::ClientError;
use crate::backoff::Backoff;
use crate::body::{BodyLength, Responder};
use crate::call::Call;
use crate::route::Subject;
use crate::server::{Refusal, Server};
use crate::term::TermValidity;
use bytes::Bytes;
use fletch_api::{Code, headers, routes};
use fletch_core::{Hash, Kind};
use fletch_host::clock::BootTime;
use http::{HeaderValue, StatusCode, header};
use reqwest::{RequestBuilder, Response};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};

/// When a server that did not answer is probed, and the longest time for the probe.
const PROBE_AFTER: Duration = Duration::from_secs(2);
const PROBE_WITHIN: Duration = Duration::from_secs(1);
/// How often servers may send a call on to each other.
const REDIRECTS_MAX: u32 = 3;

/// The time within which a failed connection is tried once more, even by a client that fails fast.
///
/// The connection may be stale, or the server may be restarting.
const FAIL_FAST_RETRY_WITHIN: Duration = Duration::from_secs(1);

/// An answer with an expected status.
pub(super) enum Answer {
    /// The whole body.
    Whole(WholeAnswer),
    /// An answer whose body is not read yet.
    Open(Response),
    /// Another server has the job: the URL of the call there.
    Elsewhere(String),
}

/// The whole body of an answer.
pub(crate) struct WholeAnswer {
    /// The body.
    pub bytes: Bytes,
    /// What the server says that the body hashes to, if the request named the body's place.
    pub content: Option<Hash>,
}

/// How a round ended without an answer.
enum Round {
    /// No server was left to ask, or one of them refused the request.
    Failed(ClientError),
    /// The deadline passed while the first server was asked.
    Late,
}

/// An answer with an expected status, the number of the server's view, and by which term it counts.
pub(super) struct Received {
    pub answer: Answer,
    pub view: Option<u64>,
    /// `None` for an answer whose body is not read yet: it carries the term itself.
    pub term: Option<TermValidity>,
}

impl Client {
    /// Returns the servers that a call asks, in their order.
    fn servers_for(&self, subject: Subject) -> Vec<Arc<Server>> {
        let all = || self.route.candidates(subject, Instant::now());
        match (&self.job_server, &self.pinned) {
            (Some(job), _) if self.has_members() => {
                let first = job.get();
                let is_other = |s: &Arc<Server>| first.as_ref().is_none_or(|first| !Arc::ptr_eq(first, s));
                let others: Vec<_> = all().into_iter().filter(is_other).collect();
                first.iter().map(Arc::clone).chain(others).collect()
            }
            (_, Some(server)) => vec![Arc::clone(server)],
            (_, None) => all(),
        }
    }

    /// Makes a call until it succeeds, fails for good, or would pass the deadline.
    ///
    /// Each round asks the servers one after the other until one answers. A wait follows a round.
    pub(super) async fn ask(
        &self,
        call: &Call,
        want: &[StatusCode],
        length: Option<BodyLength>,
        until: Instant,
    ) -> Result<(Arc<Server>, Answer), ClientError> {
        let mut backoff = Backoff::new();
        let mut last = None;
        let (begun, mut unanswered) = (Instant::now(), 0);
        let mut renewed = false;
        let error = loop {
            let servers = self.servers_for(call.subject);
            let error = match self.round(call, &servers, (want, length), until, &mut renewed).await {
                Ok(answer) => return Ok(answer),
                Err(Round::Late) => {
                    let at = servers.first().or(self.route.first());
                    let late = || {
                        let why = format!("no answer within {:?}", self.io_timeout);
                        let named = at.map_or_else(|| self.servers().to_string(), |s| s.shown.to_string());
                        Responder(&named).unreachable(why)
                    };
                    break last.unwrap_or_else(late);
                }
                Err(Round::Failed(e)) => e,
            };
            let is_first = !self.first_answer.is_received();
            let is_local = servers.iter().all(|s| s.endpoint.is_local());
            if error.is_unreachable() && self.job_server.is_some() && !self.has_members() {
                self.look_for_members(&servers, until).await;
            }
            if is_first && (error.is_refused() && is_local || error.is_tls()) || !error.retryable() {
                break error;
            }
            unanswered += u32::from(error.is_unreachable());
            if self.fail_fast
                && unanswered > 0
                && (unanswered > 1 || begun.elapsed() > FAIL_FAST_RETRY_WITHIN)
            {
                break error;
            }
            let wait = backoff.wait(error.retry_after());
            if Instant::now() + wait >= until {
                break error;
            }
            tracing::debug!(%error, ?wait, request = %format_args!("{:016x}", call.id), "retrying a request");
            self.counters.retries.fetch_add(1, Relaxed);
            sleep(wait).await;
            if error.is_tls() {
                for server in &servers {
                    server.http.refresh(true).await;
                }
            }
            last = Some(error);
        };
        self.counters.errors.fetch_add(1, Relaxed);
        Err(error)
    }

    /// Asks servers, one after the other, until one answers.
    ///
    /// A server is passed by that does not answer, is not ready, or refuses a token that may be new to it.
    /// After 429 nobody else is asked. A member that does not know a chunk's version may be late with the
    /// news of it, so one more server is asked, if possible one that the user named.
    async fn round(
        &self,
        call: &Call,
        servers: &[Arc<Server>],
        (want, length): (&[StatusCode], Option<BodyLength>),
        until: Instant,
        renewed: &mut bool,
    ) -> Result<(Arc<Server>, Answer), Round> {
        let is_several = servers.len() > 1;
        let view = is_several.then(|| self.route.view().map(|view| view.number)).flatten();
        let mut failed: Option<ClientError> = None;
        let (mut asked, mut is_unknown) = (0, false);
        let mut rest = servers.iter();
        while let Some(server) = rest.next() {
            let mut left = rest.clone();
            if is_unknown && !self.route.is_given(server) && left.any(|s| self.route.is_given(s)) {
                continue;
            }
            let is_last = rest.len() == 0;
            if is_several && !is_last && server.was_silent() && !self.answers_again(server).await {
                continue;
            }
            asked += 1;
            let (mut server, mut hops) = (Arc::clone(server), 0);
            let error = loop {
                server.http.refresh(false).await;
                let token = self.bearer.header();
                let request = self.request(call, &server, view);
                let request = match &token {
                    Some(token) => request.header(header::AUTHORIZATION, token),
                    None => request,
                };
                let attempt = self.attempt(request, &server, want, length);
                let tried = match is_several && !is_last {
                    true => timeout_at(until, self.watched(attempt, &server)).await,
                    false => timeout_at(until, attempt).await,
                };
                match tried {
                    Ok(Ok(Received { answer: Answer::Elsewhere(url), view, .. })) => {
                        self.look_at_view(&server, view, until).await;
                        hops += 1;
                        if hops > REDIRECTS_MAX {
                            let why = "the servers of the cluster do not agree where the job lives";
                            break responder(&server).unreachable(why);
                        }
                        server = self.sent_on(call, &server, &url, until).await.map_err(Round::Failed)?;
                    }
                    Ok(Ok(answer)) => {
                        if let (true, Some(term)) = (call.must_be_in_time, &answer.term)
                            && let Err(why) = term.check()
                        {
                            break responder(&server).unreachable(why);
                        }
                        self.counters.failovers.fetch_add(u64::from(failed.is_some()), Relaxed);
                        self.look_at_view(&server, answer.view, until).await;
                        if let Some(job) = &self.job_server {
                            job.answered(&server);
                        }
                        return Ok((server, answer.answer));
                    }
                    Ok(Err(e)) if e.is_unauthorized() && !*renewed && self.renewed(token).await => {
                        *renewed = true;
                    }
                    Ok(Err(e)) => break e,
                    Err(_) => {
                        let others = asked - 1;
                        return Err(failed.map_or(Round::Late, |e| Round::Failed(e.and_others(others))));
                    }
                }
            };
            if is_several && error.is_unauthorized() {
                let refusal = server.refused(Instant::now());
                let error = error.said_by(&server.shown);
                if refusal == Refusal::First {
                    tracing::warn!(?server, %error, "a server refuses the token; others are asked");
                }
                if refusal == Refusal::Final {
                    return Err(Round::Failed(error));
                }
                // Silence of the others is waited for, and then the call is made again.
                failed = failed.or(Some(error));
                continue;
            }
            let is_gone = error.is_unreachable();
            if let Some(job) = self.job_server.as_ref().filter(|_| is_gone || is_away(&error)) {
                job.forget(&server);
                if error.code() == Some(Code::JobWaits) {
                    job.waits.notify_one();
                }
            }
            if is_gone || is_unready(&error) {
                self.route.failed(&server, is_gone && !error.is_refused(), Instant::now());
            } else if matches!(call.subject, Subject::Chunk { .. }) && error.kind() == Kind::NotFound {
                // The answer of a server that the user named is final.
                if self.route.is_given(&server) || is_unknown {
                    return Err(Round::Failed(error));
                }
                is_unknown = true;
                failed = Some(error);
                continue;
            } else {
                return Err(Round::Failed(error));
            }
            // An answer says more than silence, and the first server more than the others.
            failed = match failed {
                Some(first) if first.is_unauthorized() => Some(error),
                Some(first) if is_gone || !first.is_unreachable() => Some(first),
                _ => Some(error),
            };
        }
        match failed {
            Some(error) => Err(Round::Failed(error.and_others(asked.max(1) - 1))),
            None => Err(Round::Late),
        }
    }

    /// Waits for an attempt, and gives it up if the server does not answer a probe meanwhile.
    async fn watched<T>(
        &self,
        attempt: impl Future<Output = Result<T, ClientError>>,
        server: &Arc<Server>,
    ) -> Result<T, ClientError> {
        tokio::pin!(attempt);
        let mut pause = PROBE_AFTER.min(self.io_timeout / 4);
        loop {
            tokio::select! {
                done = &mut attempt => return done,
                () = sleep(pause) => {}
            }
            // A server that answers has its reasons for being slow.
            let probe = self.is_alive(server);
            tokio::pin!(probe);
            tokio::select! {
                done = &mut attempt => return done,
                is_alive = &mut probe => if !is_alive {
                    return Err(responder(server).unreachable("it is silent"));
                },
            }
            pause *= 2;
        }
    }

    /// Returns whether a server that was silent may be asked again.
    async fn answers_again(&self, server: &Arc<Server>) -> bool {
        if !server.takes_probe(Instant::now()) {
            return false;
        }
        let is_alive = self.is_alive(server).await;
        match is_alive {
            true => server.answered(None),
            false => self.route.failed(server, true, Instant::now()),
        }
        is_alive
    }

    async fn is_alive(&self, server: &Arc<Server>) -> bool {
        let url = format!("{}{}", server.base, routes::LIVEZ);
        let probe = server.http.current().get(url).send();
        let within = PROBE_WITHIN.min(self.io_timeout / 4);
        tokio::time::timeout(within, probe).await.is_ok_and(|answer| answer.is_ok())
    }

    /// Returns the server to which another one sends a call on.
    async fn sent_on(
        &self,
        call: &Call,
        from: &Arc<Server>,
        url: &str,
        until: Instant,
    ) -> Result<Arc<Server>, ClientError> {
        if let Some(server) = self.route.member_at(url, &call.path) {
            return Ok(server);
        }
        // It may have joined since.
        self.fetch_view(from, until).await;
        self.route.member_at(url, &call.path).ok_or_else(|| {
            let place = url.strip_suffix(&call.path).unwrap_or(url);
            responder(from).protocol(format!(
                "it sends the request on to {place}, which is no server of the cluster that this client may \
                 ask; nothing was sent there; name servers by URL, and set its cluster.advertise_url"
            ))
        })
    }

    async fn renewed(&self, refused: Option<HeaderValue>) -> bool {
        let bearer = Arc::clone(&self.bearer);
        tokio::task::spawn_blocking(move || bearer.renewed(refused.as_ref())).await.unwrap_or(false)
    }

    pub(super) async fn attempt(
        &self,
        request: RequestBuilder,
        server: &Arc<Server>,
        want: &[StatusCode],
        length: Option<BodyLength>,
    ) -> Result<Received, ClientError> {
        self.counters.requests.fetch_add(1, Relaxed);
        let server_says = responder(server);
        let sent = BootTime::now();
        let response = request.send().await.map_err(|e| server_says.transport(&e))?;
        self.first_answer.record();
        self.counters.answered(response.headers());
        let view = response.headers().get(headers::VIEW).and_then(|v| v.to_str().ok()?.parse().ok());
        let from = response.remote_addr();
        let place = response.headers().get(header::LOCATION).and_then(|v| v.to_str().ok());
        if let (StatusCode::TEMPORARY_REDIRECT, Some(url)) = (response.status(), place) {
            let url = url.to_owned();
            // Read to its end, so that the connection can be used again.
            drop(server_says.body(response, BodyLength::AtMost(JSON_BYTES_MAX)).await);
            server.answered(from);
            return Ok(Received { answer: Answer::Elsewhere(url), view, term: None });
        }
        let mut response = server_says.accept(response, want).await?;
        let term = TermValidity::of(&response, sent);
        if let (Some(job), Some(told)) = (&self.job_server, &term) {
            job.check_term(&told.stamp).map_err(|why| server_says.unreachable(why))?;
        }
        let Some(length) = length else {
            if let Some(term) = term {
                response.extensions_mut().insert(term);
            }
            server.answered(from);
            return Ok(Received { answer: Answer::Open(response), view, term: None });
        };
        let content = response.headers().get(headers::CONTENT).and_then(|v| v.to_str().ok()?.parse().ok());
        let bytes = server_says.body(response, length).await?;
        server.answered(from);
        self.counters.bytes.fetch_add(bytes.len() as u64, Relaxed);
        Ok(Received { answer: Answer::Whole(WholeAnswer { bytes, content }), view, term })
    }
}

/// Whether a server that answered cannot serve now, while others may.
fn is_unready(error: &ClientError) -> bool {
    let ClientError::Problem { problem, .. } = error else { return false };
    // A proxy whose server is away answers 502 to 504 without a code.
    problem.code == Code::NotReady
        || problem.code == Code::Unknown && problem.retryable && matches!(problem.status, 502..=504)
}

/// Whether the server that has a job cannot serve it now.
fn is_away(error: &ClientError) -> bool {
    is_unready(error) || error.code() == Some(Code::JobWaits)
}
