"""The manifest fits the schema of Kubernetes. No cluster has run it."""

import kubernetes_validate
import pytest
import yaml
from harness import SCRIPTS

RESOURCES = [*yaml.safe_load_all((SCRIPTS / "kubernetes" / "elastic.yaml").read_text())]


@pytest.mark.parametrize("resource", RESOURCES, ids=[each["kind"] for each in RESOURCES])
def test_the_manifest_fits_the_schema(resource):
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_pods_meet_where_the_service_is():
    service, job = RESOURCES
    name, pod = service["metadata"]["name"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == name == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert f"--join {name}-0.{name}:29577" in pod["containers"][0]["command"][-1]
