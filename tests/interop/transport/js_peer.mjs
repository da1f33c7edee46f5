// A js-libp2p node over QUIC, driven by lines of JSON on standard input and output.
import { createLibp2p } from 'libp2p'
import { quic } from '@chainsafe/libp2p-quic'
import { gossipsub } from '@chainsafe/libp2p-gossipsub'
import { identify } from '@libp2p/identify'
import { ping } from '@libp2p/ping'
import { multiaddr } from '@multiformats/multiaddr'
import { createInterface } from 'node:readline'

const say = (line) => process.stdout.write(JSON.stringify(line) + '\n')
const PROTOCOL = '/interop/upper/1'

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/udp/0/quic-v1'] },
  transports: [quic()],
  services: {
    identify: identify(),
    ping: ping(),
    pubsub: gossipsub({ allowPublishToZeroTopicPeers: true })
  }
})

const bytes = (chunk) => chunk.subarray()

// Answers each line in upper case.
await node.handle(PROTOCOL, async ({ stream }) => {
  await stream.sink((async function * () {
    for await (const chunk of stream.source) {
      yield Buffer.from(Buffer.from(bytes(chunk)).toString().toUpperCase())
    }
  })())
})

async function ask (connection, text) {
  const stream = await connection.newStream(PROTOCOL)
  let answer = ''
  await stream.sink((async function * () { yield Buffer.from(text) })())
  for await (const chunk of stream.source) {
    answer += Buffer.from(bytes(chunk)).toString()
  }
  return answer
}

node.services.pubsub.addEventListener('message', ({ detail }) => {
  say({ gossip: Buffer.from(detail.data).toString(), topic: detail.topic, from: detail.from?.toString() })
})
node.addEventListener('peer:identify', ({ detail }) => {
  say({ identified: detail.peerId.toString(), protocols: detail.protocols })
})

const commands = {
  async dial ({ address }) {
    const connection = await node.dial(multiaddr(address))
    return { dialled: connection.remotePeer.toString() }
  },
  async ping ({ address }) { return { ping: await node.services.ping.ping(multiaddr(address)) } },
  async ask ({ address, text }) { return { answer: await ask(await node.dial(multiaddr(address)), text) } },
  async subscribe ({ topic }) { node.services.pubsub.subscribe(topic); return { subscribed: topic } },
  async publish ({ topic, text }) {
    await node.services.pubsub.publish(topic, Buffer.from(text))
    return { published: text }
  },
  async peers () { return { peers: node.getPeers().map(String) } }
}

say({ peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) })
for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...rest } = JSON.parse(line)
  try {
    say(await commands[command](rest))
  } catch (error) {
    say({ error: error.name + ': ' + error.message })
  }
}
await node.stop()
process.exit(0)
