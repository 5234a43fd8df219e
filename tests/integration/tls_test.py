"""TLS and mTLS: the right certificates work, all others are refused."""

import unittest

import grpc
import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.certs import make_certs
from harness.contract import pb
from harness.server import Attnd, run_refused

T = contract.TIMEOUT_S

def setUpModule():
    global OURS, OTHERS
    OURS, OTHERS = make_certs(), make_certs()


def credentials(ca, client=None):
    def read(path):
        return path.read_bytes()

    return grpc.ssl_channel_credentials(
        read(ca / "ca.crt"), read(client / "client.key") if client else None,
        read(client / "client.crt") if client else None)


def tls_flags(certs):
    return (f"--tls-cert={certs / 'server.crt'}", f"--tls-key={certs / 'server.key'}")


class TlsTest(unittest.TestCase):
    def call(self, server, creds, name=None):
        # Connects to the address; the certificate must be for it, or for `name`.
        options = [("grpc.ssl_target_name_override", name)] if name else ()
        stub = contract.pb_grpc.AttentionStub(server.channel(options=options, credentials=creds))
        request = simple_case(np.random.default_rng(1)).forward_request()
        return stub.Forward(request, timeout=T).report.path

    def refused(self, server, chan):
        stub = contract.pb_grpc.AttentionStub(chan)
        with self.assertRaises(grpc.RpcError) as caught:
            stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=T)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

    def test_tls(self):
        with Attnd(*tls_flags(OURS)) as server:
            self.assertEqual(self.call(server, credentials(OURS)), "flash_cpu")
            self.assertEqual(self.call(server, credentials(OURS), "localhost"), "flash_cpu")
            with self.subTest("a client that trusts another authority"):
                self.refused(server, server.channel(credentials=credentials(OTHERS)))
            with self.subTest("a client without TLS"):
                self.refused(server, server.channel())
            with self.subTest("the wrong name"):
                self.refused(server, server.channel(
                    credentials=credentials(OURS),
                    options=[("grpc.ssl_target_name_override", "other.example")]))

    def test_mtls(self):
        with Attnd(*tls_flags(OURS), f"--tls-client-ca={OURS / 'ca.crt'}") as server:
            self.assertEqual(self.call(server, credentials(OURS, OURS)), "flash_cpu")
            with self.subTest("no client certificate"):
                self.refused(server, server.channel(credentials=credentials(OURS)))
            with self.subTest("a certificate of another authority"):
                self.refused(server, server.channel(credentials=credentials(OURS, OTHERS)))
            self.assertEqual(self.call(server, credentials(OURS, OURS)), "flash_cpu")

    def test_bad_files_are_refused_by_name(self):
        missing = OURS / "no-such-file.crt"
        cases = {
            "missing certificate": ((f"--tls-cert={missing}", tls_flags(OURS)[1]), str(missing)),
            "certificate without key": ((tls_flags(OURS)[0],), "tls-key"),
            "client authority without TLS": ((f"--tls-client-ca={OURS / 'ca.crt'}",), "tls-cert"),
            "missing client authority": ((*tls_flags(OURS), f"--tls-client-ca={missing}"),
                                         str(missing)),
            "key of another certificate": ((tls_flags(OURS)[0], tls_flags(OTHERS)[1]), "key"),
            "not PEM": ((f"--tls-cert={__file__}", tls_flags(OURS)[1]), __file__),
        }
        for name, (flags, word) in cases.items():
            with self.subTest(name):
                status, text = run_refused(*flags)
                self.assertGreater(status, 0, text)
                self.assertIn(word, text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
