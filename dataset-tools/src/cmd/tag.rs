//! `fletch tag`: lists, shows, moves and deletes tags.

use super::Context;
use crate::failure::Failure;
use crate::run::{mark::Mark, now_ns};
use crate::tables_location::TablesLocation;
use crate::target::Select;
use fletch_core::TagName;
use fletch_tables::TagDoc;
use serde::Serialize;
use std::sync::atomic::AtomicBool;

#[derive(Serialize)]
struct Row {
    tag: String,
    root: String,
    layout: String,
    created: String,
}

#[derive(Serialize)]
struct Tags {
    uri: String,
    tags: Vec<Row>,
}

/// Has a tag name a version.
async fn name(location: &TablesLocation, tag: &TagName, select: &Select) -> Result<TagDoc, Failure> {
    let (root, layout) = location.resolve(select).await?;
    // A tag must not name a version that cannot be opened.
    location.version(root, layout).await?;
    let doc = TagDoc::new(root, layout, now_ns());
    location.put_tag(tag, &doc).await?;
    Ok(doc)
}

pub fn run(
    ctx: &Context,
    uri: &str,
    tag: Option<TagName>,
    to: Option<Select>,
    delete: bool,
) -> Result<(), Failure> {
    let location = ctx.location(uri)?;
    let tags = ctx.rt.block_on(async {
        let Some(tag) = tag else { return location.tags().await };
        if delete {
            let doc = location.tag(&tag).await?;
            location.delete_tag(&tag).await?;
            return Ok(doc.map(|doc| (tag, doc)).into_iter().collect());
        }
        let doc = match to {
            Some(select) => {
                let mark = Mark::of_run(&location, ctx.out, &AtomicBool::new(false)).await?;
                let named = name(&location, &tag, &select).await;
                mark.remove(ctx.out).await;
                named?
            }
            None => match location.tag(&tag).await? {
                Some(doc) => doc,
                None => return Err(location.no_tag(&tag).await),
            },
        };
        Ok(vec![(tag, doc)])
    })?;
    let row = |(tag, doc): &(TagName, TagDoc)| Row {
        tag: tag.to_string(),
        root: doc.root.to_string(),
        layout: doc.layout.to_string(),
        created: doc.created.clone(),
    };
    let result = Tags { uri: location.uri(), tags: tags.iter().map(row).collect() };
    ctx.out.result(&result, |w| {
        for t in &result.tags {
            writeln!(w, "{}\t{}\t{}", t.tag, t.root, t.created)?;
        }
        Ok(())
    })
}
