"""A Kafka that asks who one is: users, what each may do, and how a process says who it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kafka_broker import Broker
from waiting import until

IN_THE_CLEAR = {"security.protocol": "SASL_PLAINTEXT"}
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


class Right(NamedTuple):
    """An operation on a kind of resource, named as Kafka does, on one name or all that begin so."""

    operation: str
    kind: str
    name: str
    is_prefix: bool = False


def secret_of(user: str) -> str:
    return f"{user}-secret"


def user_settings(admin: str, users: Iterable[str]) -> dict[str, str]:
    """Of a broker that knows these users, of whom only `admin` has rights, and those all."""
    everyone = ("broker", admin, *users)
    known = "".join(f' user_{name}="{secret_of(name)}"' for name in everyone)
    jaas = f'{MODULE} required username="broker" password="{secret_of("broker")}"{known};'
    return {
        "inter.broker.listener.name": "SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": jaas,
        "listener.name.sasl_ssl.plain.sasl.jaas.config": jaas,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:broker;User:{admin}",
    }


def environment_of(user: str, secret: str | None = None) -> dict[str, str]:
    """What a process of the product is told of its user."""
    return {
        "STREAMRFT_KAFKA_USERNAME": user,
        "STREAMRFT_KAFKA_PASSWORD": secret or secret_of(user),
    }


def grant(broker: Broker, admin: str, user: str, rights: Iterable[Right]) -> None:
    """Let `admin` give a user rights."""
    from confluent_kafka.admin import (
        AclBinding,
        AclBindingFilter,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    bindings = [
        AclBinding(
            ResourceType[right.kind],
            right.name,
            ResourcePatternType.PREFIXED if right.is_prefix else ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation[right.operation],
            AclPermissionType.ALLOW,
        )
        for right in rights
    ]
    client = AdminClient(
        {
            "bootstrap.servers": broker.address,
            **IN_THE_CLEAR,
            "sasl.mechanism": "PLAIN",
            "sasl.username": admin,
            "sasl.password": secret_of(admin),
        }
    )
    for future in client.create_acls(bindings).values():
        future.result(60)
    # the broker goes by what it has read of the metadata, a moment after it said yes
    of_all = (ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY)
    every = AclBindingFilter(ResourceType.ANY, None, *of_all)
    until(lambda: set(bindings) <= set(client.describe_acls(every).result(60)), "the rights")
