//! `fletch status` and `fletch top`: ask the server for its numbers, and print them.

use super::Context;
use crate::failure::{Exit, Failure};
use crate::status::{CredentialRow, Health, MountRow, Snapshot, health, screen};
use fletch_api::{Dataset, Mount};
use fletch_client::{Client, ClientError};
use fletch_core::Kind;
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

/// Returns an answer of a route that an older server does not have; nothing from such a server.
fn if_known<T: Default>(answer: Result<T, ClientError>) -> Result<T, ClientError> {
    match answer {
        Err(e) if e.kind() == Kind::NotFound => Ok(T::default()),
        answer => answer,
    }
}

/// Returns the mounts that announced themselves, and the dead ones of this machine, by directory.
///
/// A dead mount announces nothing, so only this machine's mount table names it.
async fn mount_rows(client: &Client, datasets: &[Dataset], announced: Vec<Mount>) -> Vec<MountRow> {
    let mut rows: Vec<MountRow> = announced
        .into_iter()
        .map(|mount| {
            let Mount { announced: a, benefit, .. } = mount;
            MountRow {
                dir: a.dir,
                host: a.host,
                dataset: a.dataset.to_string(),
                job: a.job.to_string(),
                dead: false,
                problem: a.problem,
                benefit,
            }
        })
        .collect();
    if !client.servers().is_local() {
        return rows;
    }
    let dead = tokio::task::spawn_blocking(fletch_host::mounts::dead_mounts).await;
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
    for mount in dead.ok().and_then(Result::ok).unwrap_or_default() {
        let Some(dataset) = mount.dataset().filter(|name| datasets.iter().any(|d| d.name.as_str() == *name))
        else {
            continue;
        };
        let (dir, dataset) = (mount.dir.display().to_string(), dataset.to_owned());
        match rows.iter_mut().find(|row| row.dir == dir && row.host == host) {
            Some(row) => row.dead = true,
            None => {
                let (host, job) = (host.clone(), "-".to_owned());
                rows.push(MountRow { dir, host, dataset, job, dead: true, problem: None, benefit: None });
            }
        }
    }
    rows
}

async fn snapshot(client: &Client, server: &str) -> Result<Snapshot, Failure> {
    let (info, datasets, accounts, jobs, origins) =
        tokio::try_join!(client.info(), client.datasets(), client.accounts(), client.jobs(), async {
            for_admins(client.origins().await)
        },)?;
    let (mounts, drafts, allocation, credentials, seen) = tokio::try_join!(
        async { if_known(client.mounts().await) },
        async { if_known(client.drafts().await) },
        async { if_known(client.allocation().await) },
        async { if_known(for_admins(client.credentials().await)) },
        async {
            // An answer of another release may have another form. Then the rates are those of this sample.
            Ok(client.dashboard().await.map_or_else(|_| Vec::new(), |now| now.jobs))
        }
    )?;
    let mounts = mount_rows(client, &datasets, mounts).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Snapshot {
        server: server.to_owned(),
        cluster: client.members().into_iter().map(|(_, url)| url).collect(),
        at_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
        info,
        datasets,
        drafts,
        accounts,
        jobs,
        seen,
        allocation,
        origins,
        mounts,
        credentials: credentials
            .into_iter()
            .map(|c| CredentialRow { origin: c.origin, identity: c.identity, expires_ns: c.expires_ns })
            .collect(),
    })
}

/// Prints the server's state on one screen.
pub fn status(ctx: &Context) -> Result<(), Failure> {
    // All numbers are of one server.
    let (client, server) = ctx.reached()?;
    let client = client.at(&server);
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
    // All numbers are of one server.
    let (client, server) = ctx.reached()?;
    let client = client.at(&server);
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
