//! Orders to all other members: what this server does for a domain, the others are to do, too.

use super::{
    ClusterState,
    peers::{CallError, PeerAddress, Peers},
    refusals::RefusalReason,
};
use bytes::Bytes;
use fletch_api::{headers, routes};
use fletch_core::{Domain, MemberId};
use futures::future::join_all;
use reqwest::{Method, StatusCode, header::CONTENT_TYPE};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// The longest answer to an order.
const ANSWER_BYTES_MAX: u32 = 16 << 10;

/// An order to other members.
#[derive(Debug, Clone)]
pub struct PeerOrder {
    pub method: Method,
    /// The path and the query, below `/v1/peers/`.
    pub path: String,
    /// The domain that it is about.
    pub domain: Domain,
    /// JSON, for an order that needs more than a path.
    pub body: Option<Bytes>,
}

/// What became of an order.
#[derive(Debug, Default)]
pub struct OrderAnswers {
    /// The bodies of the answers.
    pub bodies: Vec<Bytes>,
    /// The members that did not confirm it: they are down, did not answer in time, or are too old.
    pub unconfirmed: Vec<MemberId>,
}

impl ClusterState {
    /// Gives an order to all other members, and waits at most `within` for their answers.
    ///
    /// A server that is alone gives it to nobody.
    pub async fn order_all(&self, order: &PeerOrder, within: Duration) -> OrderAnswers {
        let Some(peers) = self.peers() else { return OrderAnswers::default() };
        let view = self.view();
        let others: Vec<&MemberId> = view.members().filter(|id| *id != self.own_id()).collect();
        let until = Instant::now() + within;
        let calls = others.into_iter().map(|id| {
            let to = view.address(id);
            async move {
                let answer = match &to {
                    Some(to) => peers.order(to, order, ANSWER_BYTES_MAX, until).await.inspect_err(|error| {
                        tracing::warn!(peer = %id, %error, path = order.path, "a peer did not take an order");
                    }),
                    None => Err(CallError::Left),
                };
                (id, answer)
            }
        });
        let mut answers = OrderAnswers::default();
        for (id, answer) in join_all(calls).await {
            match answer {
                Ok(body) => answers.bodies.push(body),
                Err(_) => answers.unconfirmed.push(id.clone()),
            }
        }
        answers
    }
}

impl ClusterState {
    /// Gives an order to one member, and waits at most `within` for its answer.
    ///
    /// # Errors
    /// Why the member did not take it.
    pub async fn order_one(
        &self,
        to: &MemberId,
        order: &PeerOrder,
        within: Duration,
    ) -> Result<Bytes, String> {
        let view = self.view();
        let (Some(peers), Some(to)) = (self.peers(), view.address(to)) else {
            return Err(CallError::Left.to_string());
        };
        let until = Instant::now() + within;
        peers.order(&to, order, ANSWER_BYTES_MAX, until).await.map_err(|error| error.to_string())
    }
}

/// The path of an order that changes nothing: it ends the protection by a warm-up that does not exist.
const NO_CHANGE: &str = "check0";

impl ClusterState {
    /// Asks all other members of the view for a sign of life, with this server's peer token. Returns why a
    /// member does not answer.
    pub async fn check_peers(&self, within: Duration) -> Vec<(MemberId, Option<String>)> {
        let Some(peers) = self.peers() else { return Vec::new() };
        let (view, until) = (self.view(), Instant::now() + within);
        let order = PeerOrder {
            method: Method::PUT,
            path: format!("{}?hold_s=0", routes::peer_warmup(NO_CHANGE)),
            domain: Domain::default_domain(),
            body: None,
        };
        let others = view.members().filter(|id| *id != self.own_id());
        let calls = others.map(|id| {
            let (to, order) = (view.address(id), &order);
            async move {
                let problem = match &to {
                    Some(to) => {
                        let answer = peers.order(to, order, ANSWER_BYTES_MAX, until).await;
                        answer.err().map(|error| error.to_string())
                    }
                    None => Some("it is down, or of another release".to_owned()),
                };
                (id.clone(), problem)
            }
        });
        join_all(calls).await
    }
}

impl Peers {
    /// Gives an order to one member. The answer has at most `most` bytes.
    pub(super) async fn order(
        &self,
        to: &PeerAddress,
        order: &PeerOrder,
        most: u32,
        until: Instant,
    ) -> Result<Bytes, CallError> {
        let answered = async {
            let call = || async {
                let call = self.start(to, order.method.clone(), &order.path, &order.domain).await?;
                Ok::<_, CallError>(match &order.body {
                    Some(body) => call.header(CONTENT_TYPE, headers::JSON).body(body.clone()),
                    None => call,
                })
            };
            let mut response = self.finish(to, call().await?).await?;
            if response.status() == StatusCode::UNAUTHORIZED && self.read_token_again().await {
                response = self.finish(to, call().await?).await?;
            }
            match response.status() {
                StatusCode::OK | StatusCode::NO_CONTENT => super::peers::body(response, most).await,
                status => Err(CallError::Status(status)),
            }
        };
        let answer = timeout_at(until, answered).await.unwrap_or(Err(CallError::Late));
        match &answer {
            Ok(_) => self.refusals().end(&to.id, RefusalReason::Token),
            Err(error) => self.note_refusal(&to.id, error),
        }
        answer
    }
}
