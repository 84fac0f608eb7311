//! `fletch status` and `fletch top`: ask the server for its numbers, and print them.

use super::Context;
use crate::failure::{Exit, Failure};
use crate::status::{CredentialRow, Health, Snapshot, health, screen};
use fletch_api::{Code, GivenCredentials};
use fletch_client::{Client, ClientError};
use fletch_settings::Span;
use serde::Serialize;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::sleep;

/// The time between the two samples from which `status` computes rates.
const SAMPLE: Duration = Duration::from_millis(500);
/// Moves the cursor to the top left corner, and clears from there.
const REDRAW: &str = "\x1b[H\x1b[J";

#[derive(Serialize)]
struct Document<'a> {
    health: Health,
    #[serde(flatten)]
    snapshot: &'a Snapshot,
}

impl<'a> Document<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        Document { health: health(snapshot), snapshot }
    }
}

/// Returns an answer that only admins get; nothing for others.
fn for_admins<T: Default>(answer: Result<T, ClientError>) -> Result<T, ClientError> {
    match answer {
        Err(e) if e.is_denied() => Ok(T::default()),
        answer => answer,
    }
}

/// Returns the credentials that were handed to the server, as far as the caller may see them.
async fn credentials(client: &Client) -> Result<Vec<CredentialRow>, ClientError> {
    let given = match client.credentials().await {
        // A server that is older than the route.
        Err(e) if e.code() == Some(Code::NotFound) => Vec::new(),
        given => for_admins(given)?,
    };
    let row = |given: GivenCredentials| CredentialRow {
        origin: given.origin,
        identity: given.identity,
        expires_ns: given.expires_ns,
    };
    Ok(given.into_iter().map(row).collect())
}

async fn snapshot(client: &Client, server: &str) -> Result<Snapshot, Failure> {
    let (info, datasets, accounts, jobs, origins, credentials) = tokio::try_join!(
        client.info(),
        client.datasets(),
        client.accounts(),
        client.jobs(),
        async { for_admins(client.origins().await) },
        async { credentials(client).await },
    )?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Snapshot {
        server: server.to_owned(),
        at_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
        info,
        datasets,
        accounts,
        jobs,
        origins,
        mounts: Vec::new(),
        credentials,
    })
}

/// Prints the server's state on one screen.
pub fn status(ctx: &Context) -> Result<(), Failure> {
    let (client, server) = (ctx.client()?, ctx.endpoint()?.to_string());
    let (before, now) = ctx.rt.block_on(async {
        let first = snapshot(&client, &server).await?;
        // Rates need a second sample; without jobs nobody waits for it.
        if ctx.out.json || first.accounts.jobs.is_empty() {
            return Ok::<_, Failure>((None, first));
        }
        sleep(SAMPLE).await;
        let second = snapshot(&client, &server).await?;
        Ok((Some(first), second))
    })?;
    ctx.out.result(&Document::of(&now), |w| w.write_all(screen(before.as_ref(), &now).as_bytes()))
}

/// Prints the server's state again and again: on a terminal over the last one, else below it.
pub fn top(ctx: &Context, once: bool, interval: Span) -> Result<Exit, Failure> {
    let (client, server) = (ctx.client()?, ctx.endpoint()?.to_string());
    let redraw = std::io::stdout().is_terminal() && !ctx.out.json && !once;
    ctx.rt.block_on(async {
        let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())
            .map_err(|e| Failure::io("cannot wait for Ctrl-C", &e))?;
        let mut before = snapshot(&client, &server).await?;
        loop {
            tokio::select! {
                () = sleep(interval.0) => {}
                _ = interrupt.recv() => return Ok(Exit::Interrupted),
            }
            let now = snapshot(&client, &server).await?;
            if redraw {
                let shown = format!("{REDRAW}{}", screen(Some(&before), &now));
                let mut out = std::io::stdout().lock();
                let written = out.write_all(shown.as_bytes()).and_then(|()| out.flush());
                written.map_err(|e| crate::out::stdout_failed(&e))?;
            } else {
                let document = Document::of(&now);
                ctx.out.result(&document, |w| w.write_all(screen(Some(&before), &now).as_bytes()))?;
            }
            if once {
                return Ok(Exit::Ok);
            }
            before = now;
        }
    })
}
