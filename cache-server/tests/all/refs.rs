//! Tests an epoch of `ref` frames: a lease says where the bytes lie, and the consumer reads them there.

use crate::common::{Node, Tree, body, epochs::*};
use bytes::Bytes;
use fletch_api::{
    BatchTimes, GrantStatus, LeaseGrant, LeaseRequest, OrderKind, SampleHead, SampleRef,
    epochs::Ack,
    frames::{Decoder, Frame},
    routes,
};
use fletch_client::epochs::{JobHandle, Next, ReceivedSum};
use fletch_core::{
    Hash,
    delivery::receipt::{Delivery, content},
    plan::Tail,
};
use reqwest::StatusCode;

/// What one consumer of references received.
#[derive(Default)]
struct Saw {
    refs: u64,
    data: u64,
    /// The samples whose bytes lie in several chunks, and all pieces.
    split: u64,
    pieces: u64,
}

/// Reads the bytes of a reference, each piece as a range of its chunk.
async fn read(node: &Node, job: &JobHandle, place: &SampleRef) -> Vec<u8> {
    let mut bytes = Vec::new();
    for p in &place.pieces {
        let get = node.get(&routes::chunk(job.info().root, p.chunk));
        let range = format!("bytes={}-{}", p.offset, p.offset + p.len - 1);
        let got = get.header("range", range).send().await.expect("answer");
        bytes.extend(body(got, StatusCode::PARTIAL_CONTENT).await);
    }
    bytes
}

/// Reads a rank's epoch from the wire, and checks every frame.
async fn by_refs(
    node: &Node,
    tree: &Tree,
    job: &JobHandle,
    rank: u32,
    want: u32,
    saw: &mut Saw,
) -> ReceivedSum {
    let mut received = ReceivedSum::new(job.info().root);
    let path = routes::epoch(&job.info().id, 0, "leases");
    for sequence in 1.. {
        let ask = LeaseRequest { rank, sequence, want, refs: true, ..LeaseRequest::default() };
        let answer =
            node.post(&path, serde_json::to_string(&ask).expect("json")).send().await.expect("answer");
        let mut frames = Decoder::new(1 << 20);
        frames.feed(Bytes::from(body(answer, StatusCode::OK).await));
        let (mut grant, mut head) = (None::<LeaseGrant>, None::<SampleHead>);
        while let Some(frame) = frames.next_frame().expect("a frame") {
            match frame {
                Frame::Grant { grant: g } => grant = Some(serde_json::from_slice(&g).expect("a grant")),
                Frame::Sample { head: h, .. } => head = Some(serde_json::from_slice(&h).expect("a head")),
                Frame::Ref { location: place, .. } => {
                    let head = head.take().expect("a sample before its ref");
                    let place: SampleRef = serde_json::from_slice(&place).expect("a ref");
                    saw.refs += 1;
                    saw.pieces += place.pieces.len() as u64;
                    saw.split += u64::from(place.pieces.len() > 1);
                    let bytes = read(node, job, &place).await;
                    let (mut at, mut hashes) = (0, Vec::new());
                    for f in &head.files {
                        let end = at + usize::try_from(f.size).expect("a length");
                        assert!(bytes[at..end] == tree.files[&f.path][..], "I1: {}", f.path);
                        hashes.push(Hash::of(&bytes[at..end]));
                        at = end;
                    }
                    assert_eq!(at, bytes.len());
                    let (ordinal, copy) = (head.ordinal, head.copy);
                    received.add_delivery(&Delivery { ordinal, content: content(&hashes), copy });
                }
                Frame::Data { .. } => saw.data += 1,
                Frame::Error { problem, .. } => panic!("{}", String::from_utf8_lossy(&problem)),
                Frame::End { .. } => {}
            }
        }
        let grant = grant.expect("a grant");
        if grant.status != GrantStatus::Granted {
            assert_eq!(grant.status, GrantStatus::Done);
            break;
        }
        let upto = u32::try_from(grant.entries.len()).expect("few");
        job.ack(0, rank, &[Ack { lease: grant.lease, upto, batches: Vec::new() }])
            .await
            .expect("acknowledged");
    }
    received
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_epoch_runs_with_ref_frames_only() {
    let tree = tree(60);
    let plain = tempfile::tempdir().expect("tempdir");
    let packs = tempfile::tempdir().expect("tempdir");
    tree.index_plain(plain.path());
    let (_, objects) = tree.pack_to(packs.path(), false);
    assert!(!objects.is_empty());
    for (tables, chunked) in [(&plain, false), (&packs, true)] {
        let node = Node::start(&[]).await;
        node.register("d", &tree.uri(), Some(&tables.path().display().to_string())).await;
        let client = client(&node);
        for order in [OrderKind::Strict, OrderKind::Substitute] {
            let name = |what: &str| format!("{what}-{}", order.as_str());
            let spec = ask(&name("wire"), order, world(2, 8, Tail::Pad));
            let job = client.declare(&spec).await.expect("declared");
            let mut saw = Saw::default();
            let mut all = ReceivedSum::new(job.info().root);
            for rank in 0..2 {
                all.merge(&by_refs(&node, &tree, &job, rank, 4, &mut saw).await);
            }
            let receipt = job.receipt(0).await.expect("finished");
            assert!(all.agrees(&receipt));
            assert_eq!((saw.refs, saw.data), (receipt.receipt.delivered, 0));
            assert!(saw.split >= 1, "one is longer than a chunk");
            println!(
                "packs {chunked}, {}: {} refs of {} pieces, {} samples in several chunks, {} data frames",
                order.as_str(),
                saw.refs,
                saw.pieces,
                saw.split,
                saw.data
            );
            // The client does the same by itself.
            let spec = ask(&name("client"), order, world(1, 4, Tail::Keep));
            let job = client.declare(&spec).await.expect("declared");
            let mut all = ReceivedSum::new(job.info().root);
            let mut reader = job.reader(0, 0, 0).by_refs(true);
            while let Next::Batch(b) = reader.next(4).await.expect("a lease") {
                job.ack(0, 0, &[b.token.ack(BatchTimes::default())]).await.expect("acknowledged");
                for s in &b.samples {
                    right(&tree, s);
                    all.add(s);
                }
            }
            assert!(all.agrees(&job.receipt(0).await.expect("finished")));
        }
        node.running.shutdown().await;
    }
}
