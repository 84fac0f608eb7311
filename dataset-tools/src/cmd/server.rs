//! The commands that only call a server: `register`, `unregister`, `datasets`.

use super::prepare::give_credentials;
use super::{Context, absent};
use crate::failure::{Exit, Failure};
use crate::run::written;
use fletch_api::{Code, Dataset, RegisterDataset, RegisteredDataset, Unconfirmed};
use fletch_core::DatasetName;
use fletch_origin::OriginUri;
use serde::Serialize;
use std::io;

pub fn register(
    ctx: &Context,
    name: DatasetName,
    source: &str,
    tables: Option<String>,
    replace: bool,
) -> Result<(), Failure> {
    // The server has another working directory, so relative paths are resolved here.
    let origin = ctx.uri(source)?;
    let uri = ctx.uri_at_server(source)?;
    let place = match &tables {
        Some(tables) => Some(ctx.uri(tables)?),
        None => None,
    };
    let given = match &tables {
        Some(tables) => Some(ctx.uri_at_server(tables)?),
        None => None,
    };
    let places = ctx.written(&origin);
    let remembered = match written::best(&places) {
        Some(place) if given.is_none() => Some(ctx.remembered_uri(&place.tables)?),
        _ => None,
    };
    let written_at = match &remembered {
        Some(written_at) => Some(ctx.at_server(written_at)?),
        None => None,
    };
    // Without --tables: where this account wrote them, then the dataset itself.
    let mut candidates = match &given {
        Some(given) => vec![given.clone()],
        None => written_at.into_iter().chain([uri.clone()]).collect(),
    };
    candidates.dedup();
    let client = ctx.client()?;
    if ctx.asks_own_server()? {
        let stores: Vec<&OriginUri> = [&origin].into_iter().chain(&place).chain(&remembered).collect();
        ctx.claim(&stores)?;
        give_credentials(ctx, &client, &stores)?;
    }
    let mut refused = None;
    for tables in candidates {
        let tables = (tables != uri).then_some(tables);
        let request = RegisterDataset {
            name: name.clone(),
            uri: uri.clone(),
            tables: tables.clone(),
            replace,
            check: true,
        };
        match ctx.rt.block_on(client.register(&request)) {
            Err(e) if e.code() == Some(Code::NotIndexed) => {}
            // The server cannot read what this account remembers. The dataset itself may have tables.
            Err(e) if given.is_none() && e.code() == Some(Code::UriNotAllowed) => {
                refused = refused.or(Some(e));
            }
            Err(e) => return Err(e.into()),
            Ok(RegisteredDataset { dataset, unconfirmed: Unconfirmed { unconfirmed } }) => {
                warn_unconfirmed(ctx, &name, &unconfirmed);
                if let Some(tables) = tables.filter(|_| given.is_none()) {
                    ctx.out.note(format!("its tables are at {tables}, where this account wrote them"));
                }
                return ctx.out.result(&dataset, |w| row(w, &dataset));
            }
        }
    }
    if let Some(e) = refused {
        return Err(e.into());
    }
    let register = format!("fletch register {name} {source}");
    Err(absent::not_indexed(source, given.as_deref(), &places, Some(&register)))
}

/// Names the servers of a cluster that may still serve what was registered as `name`.
fn warn_unconfirmed(ctx: &Context, name: &DatasetName, servers: &[String]) {
    if !servers.is_empty() {
        let servers = servers.join(", ");
        ctx.out.warn(format!(
            "{servers} did not confirm it, and may serve what was {name} until in touch with the cluster \
             again; `fletch cluster status` shows the servers"
        ));
    }
}

fn row(w: &mut dyn io::Write, d: &Dataset) -> io::Result<()> {
    write!(w, "{}\t{}", d.name, d.uri)?;
    if d.tables == d.uri { writeln!(w) } else { writeln!(w, "\ttables {}", d.tables) }
}

/// Unregisters a dataset. [`Exit::Partial`]: some servers may still serve it.
pub fn unregister(ctx: &Context, name: &DatasetName) -> Result<Exit, Failure> {
    #[derive(Serialize)]
    struct Unregistered<'a> {
        name: &'a DatasetName,
        #[serde(skip_serializing_if = "<[String]>::is_empty")]
        unconfirmed: &'a [String],
    }
    let client = ctx.client()?;
    let unconfirmed = &*ctx.rt.block_on(client.unregister(name))?;
    warn_unconfirmed(ctx, name, unconfirmed);
    ctx.out.result(&Unregistered { name, unconfirmed }, |w| writeln!(w, "{name}"))?;
    Ok(if unconfirmed.is_empty() { Exit::Ok } else { Exit::Partial })
}

pub fn datasets(ctx: &Context) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct All {
        datasets: Vec<Dataset>,
    }
    let client = ctx.client()?;
    let all = All { datasets: ctx.rt.block_on(client.datasets())? };
    ctx.out.result(&all, |w| all.datasets.iter().try_for_each(|d| row(w, d)))
}
