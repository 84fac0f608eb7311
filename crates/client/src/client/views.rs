//! How a client learns of the cluster: it hears numbers of views in answers, and fetches a view that is news.

use super::{
    Client, JSON_BYTES_MAX, parse, responder,
    retries::{Answer, Received},
};
use crate::ClientError;
use crate::body::BodyLength;
use crate::route::Subject;
use crate::server::Server;
use fletch_api::{Cluster, routes};
use http::{StatusCode, header};
use reqwest::Response;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};

/// The longest time for which a call waits for the view of the cluster.
const VIEW_WITHIN: Duration = Duration::from_millis(500);

impl Client {
    /// Looks for other servers of the cluster, where the one that has a job does not answer. Never fails.
    pub(super) async fn look_for_members(&self, asked: &[Arc<Server>], until: Instant) {
        let others = self.route.candidates(Subject::Any, Instant::now());
        for other in others.iter().filter(|other| !asked.iter().any(|s| Arc::ptr_eq(s, other))) {
            self.fetch_view(other, until).await;
            if self.has_members() {
                return;
            }
        }
    }

    /// Fetches the view from a server, if its answer is news of one. Never fails.
    pub(super) async fn look_at_view(&self, server: &Arc<Server>, number: Option<u64>, until: Instant) {
        if self.route.hear(number, Instant::now()) {
            self.fetch_view(server, until).await;
        }
    }

    pub(super) async fn fetch_view(&self, server: &Arc<Server>, until: Instant) {
        if self.servers().is_unix() {
            return;
        }
        let known = self.route.view().and_then(|view| view.etag.clone());
        let mut request = server.http.current().get(format!("{}{}", server.base, routes::CLUSTER));
        if let Some(token) = self.bearer.header() {
            request = request.header(header::AUTHORIZATION, token);
        }
        if let Some(etag) = known {
            request = request.header(header::IF_NONE_MATCH, etag);
        }
        let until = until.min(Instant::now() + VIEW_WITHIN);
        let want = [StatusCode::OK, StatusCode::NOT_MODIFIED];
        match timeout_at(until, self.attempt(request, server, &want, None)).await {
            Ok(Ok(Received { answer: Answer::Open(response), .. })) => {
                let adopted = timeout_at(until, self.adopt_view(server, response)).await;
                match adopted {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "the view of the cluster cannot be used"),
                    Err(_) => tracing::debug!("the view of the cluster came too slowly"),
                }
            }
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "the view of the cluster cannot be fetched"),
            Err(_) => tracing::debug!(server = %server.shown, "the view of the cluster did not come in time"),
        }
    }

    async fn adopt_view(&self, server: &Arc<Server>, response: Response) -> Result<(), ClientError> {
        if response.status() == StatusCode::NOT_MODIFIED {
            return Ok(());
        }
        let etag = response.headers().get(header::ETAG).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let bytes = responder(server).body(response, BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        let cluster: Cluster = parse(server, &bytes)?;
        let route = Arc::clone(&self.route);
        let now = Instant::now();
        // It may read the files of TLS.
        drop(tokio::task::spawn_blocking(move || route.adopt(&cluster, etag, now)).await);
        Ok(())
    }
}
